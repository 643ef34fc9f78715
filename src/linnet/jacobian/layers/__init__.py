"""What each layer knows: (input, output gradient) to blocks of columns."""
