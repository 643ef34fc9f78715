"""One table of all tasks: linnet's defaults beside what people do with a trained network and new data."""
