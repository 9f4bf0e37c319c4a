"""Language models: one contract, and the families that keep it."""
