"""The verifier's and the drafter's files: sizes, names, vocabulary, what an engine needs of an export."""
