"""The service: the faces of a store and the memory behind them."""
