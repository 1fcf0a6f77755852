"""The store service: its transports and the block store behind them."""
