"""Would a comparison notice what is wrong? It is fed wrong results and right ones."""
