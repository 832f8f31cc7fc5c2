"""Which keys each query saw, read off the answers by patterns, spans and counts."""
