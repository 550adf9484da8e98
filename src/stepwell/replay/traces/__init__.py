"""Traces: what requests arrived when, and which blocks of tokens they share. One format a file."""
