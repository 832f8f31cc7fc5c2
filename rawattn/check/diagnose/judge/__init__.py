"""Which bug it is: ``diagnosis`` asks ``match`` and ``proofs``, ``failures`` asks a candidate."""
