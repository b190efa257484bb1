"""The semantic-ID trie and the beam search that it constrains."""
