"""Pure decisions: no I/O, no clock, no lock, no metric; time comes in as an argument."""
