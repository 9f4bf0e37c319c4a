"""Tokens on disk: the token store and its preparation from a corpus. No torch."""
