"""Tasks: one file each, with its data, prompt and reward."""
