"""State dict translation, one module per family of Hugging Face models."""
