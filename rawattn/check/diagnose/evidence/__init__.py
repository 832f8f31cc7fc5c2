"""What is wrong with an answer, whatever the bug: identities that fail, and where it differs."""
