"""What a function does, read off it: it is called on inputs whose results are its intermediates."""
