"""What is looked at before an engine starts, and what explains a low acceptance afterwards."""
