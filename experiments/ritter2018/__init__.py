"""Posteriors that go on: tasks one after another, and networks of several sites merged."""
