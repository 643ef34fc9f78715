"""Data, prior and likelihood to posterior and evidence."""
