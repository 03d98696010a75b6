"""The chat format of MiniMax-M1: tokens in, tokens out. No torch, no HTTP."""
