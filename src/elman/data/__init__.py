"""Tokens on disk, made from a corpus, and the streams and segments that training cuts from them."""
