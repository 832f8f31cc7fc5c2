"""Which side is wrong, and which bug is it? ``judge.diagnosis`` is the way in.

An answer is compared with the float64 attention of its question, and with that of every known bug
planted in it (``engine``): the bug whose results the answer reproduces down to rounding is named.
The rooms, each of which imports none but those before it:

    engine      attention step by step, any step of which a bug may replace
    evidence    identities and patterns that need no bug to be known; sets of pairs as rules
    catalogue   the classes, and the bugs that are listed; ``sparse`` those of block lists
    inferred    the bugs that are read off the answers
    read        what a function does, asked with inputs whose results are its weights and slopes
    judge       which bug it is: what fits, what is proved, what is said of failing cases
    report      a diagnosis in words, and as a page
    files       questions and answers in .npz files
    logs        what printed tensors prove
    harness     what a comparison function lets pass

``findings`` is what all of them say, as plain data.
"""
