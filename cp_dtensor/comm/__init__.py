"""Communication between ranks: KV transports and their choice, head exchange, symmetric memory, process groups."""
