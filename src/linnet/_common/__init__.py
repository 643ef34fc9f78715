"""Messages, files, torch settings, ranks, memory: knows nothing of the mathematics."""
