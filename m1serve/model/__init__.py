"""The MiniMax-M1 model family in plain torch: nano, slice and M1 itself are sizes of one class."""
