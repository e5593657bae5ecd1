"""Speculative decoding: drafts and their verification. Begin with draft.py."""
