"""What users have (arrays, frames, dicts, Datasets, loaders) as batches in a fixed order."""
