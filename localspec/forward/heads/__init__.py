"""Small networks that read a target's hidden states and guess its next tokens. One file a kind;
`files` reads and writes their folders."""
