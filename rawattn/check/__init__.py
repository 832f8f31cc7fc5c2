"""The command ``rawattn-check``: is what rawattn, or somebody else's attention, computes right?"""
