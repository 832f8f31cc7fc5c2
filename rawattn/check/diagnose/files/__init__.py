"""Questions and answers in .npz files, whatever names and layouts they come in."""
