"""Small networks that read a target's hidden states and predict its next tokens. One file a kind;
`files` reads and writes their folders, `autoregressive` runs those that read their own outputs."""
