"""The front door: chooses workers, runs a request leg by leg, relays one gapless stream."""
