"""How a chunk's bytes look outside memory: headers and checksums."""
