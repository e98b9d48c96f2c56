"""What a stage would do and take, from manifests, indexes and JSON files."""
