"""Look into trained models."""
