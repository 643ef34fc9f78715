"""What all estimators share: inputs, files, the hub."""
