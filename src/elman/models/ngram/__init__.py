"""The n-gram model: counted by sorting, smoothed, kept as a tree of contexts."""
