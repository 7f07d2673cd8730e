"""Pieces of torch that work across stages."""
