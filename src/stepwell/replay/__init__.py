"""The cache's own policies under a virtual clock, on recorded or made-up traffic."""
