"""How a model fares at length on one device: reading, decoding, snapshots; `run` is all of it."""
