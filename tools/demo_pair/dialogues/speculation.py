"""The app's own topic: how speculative decoding works and what the numbers on the screen mean.

Contract: skills as `shape.Skill`. Each topic pairs many ways to ask with answers built from two or
three sentences in changing order of detail. The facts follow the project's own design (Leviathan
et al. 2023, arXiv 2211.17192).
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.shape import Exchange, casual, usual

DECODING = (
    "speculative decoding",
    (
        "Speculative decoding makes a language model faster without changing its answers.",
        "Speculative decoding is a way to get the same answer from a language model in less time.",
    ),
    (
        "A small draft model guesses the next few tokens, and the large target model checks all of "
        "them in one step.",
        "A draft proposes several tokens, and the target verifies them together in one pass.",
    ),
    (
        "Guesses that the target agrees with are kept, and the first wrong one is replaced by the "
        "target's own token.",
        "The target keeps the guesses it agrees with, so the text is the same as without the draft.",
    ),
)
TOPICS = (
    DECODING,
    ("the draft model",
     ("The draft model is a small, fast model that guesses the next tokens.",
      "A draft model is the small model that runs ahead and proposes tokens."),
     ("It must use the same tokens as the target, and it should be much cheaper to run.",
      "It may be wrong, because the target checks every guess."),
     ("A good draft is right often, so that many of its tokens are accepted.",
      "The better it predicts the target, the faster the answer appears.")),
    ("the target model",
     ("The target model is the large model whose answer you want to read.",
      "The target is the main model: it decides every token of the answer."),
     ("It checks the tokens that the draft proposed, all in one step.",
      "It reads the guesses of the draft in one pass and accepts or rejects each of them."),
     ("Because the target has the last word, the quality does not change.",
      "The draft can only change the speed, never the answer.")),
    ("the acceptance rate",
     ("The acceptance rate is the share of drafted tokens that the target accepted.",
      "Acceptance rate means accepted tokens divided by drafted tokens."),
     ("If the draft proposes ten tokens and eight are kept, the acceptance rate is 80 percent.",
      "If five tokens are drafted and four are accepted, the rate is 80 percent."),
     ("A high rate means that the draft predicts the target well and the answer comes faster.",
      "When it is low, drafting costs more than it saves, so localspec drafts less.")),
    ("gamma",
     ("Gamma is the number of tokens that the draft proposes in one round.",
      "Gamma, also called the draft length, says how many tokens are guessed before each check."),
     ("A larger gamma can save more steps when the guesses are right.",
      "With a large gamma you gain more if all guesses are accepted."),
     ("If the guesses are often wrong, a small gamma is better, so localspec adapts it as it runs.",
      "localspec changes gamma while it runs, from the acceptance and the measured times.")),
    ("tokens per second",
     ("Tokens per second is the speed of the answer.",
      "Tokens per second counts how many tokens appear each second while the model answers."),
     ("It is the number of decoded tokens divided by the time spent on decoding.",
      "The time to read your prompt is measured separately."),
     ("A token is a short piece of text, often a word or a part of a word.",
      "With speculative decoding this number goes up when many guesses are accepted.")),
    ("the speedup",
     ("The speedup compares this answer with plain decoding on the same machine.",
      "Speedup is the speed with drafting divided by the speed without it."),
     ("A speedup of 2 means that the answer came twice as fast.",
      "If plain decoding gives 20 tokens per second and drafting gives 40, the speedup is 2."),
     ("It is shown only after plain decoding was measured on this computer.",
      "localspec measures both here and does not guess.")),
    ("a token",
     ("A token is a small piece of text, such as a word, a part of a word or a single sign.",
      "Tokens are the pieces that a language model reads and writes."),
     ("The model writes its answer one token at a time.",
      "A short word is often one token, and a long word may be several."),
     ("Each digit of a number is one token for me.",
      "That is why the speed is given in tokens per second.")),
    ("verification",
     ("Verification is the step in which the target checks the drafted tokens.",
      "To verify means that the target computes its own probabilities for all drafted tokens."),
     ("All drafted tokens are checked in one pass, which costs little more than one token.",
      "One pass over several tokens takes about as long as a pass over one."),
     ("The first token that does not fit is rejected, and the target puts its own in its place.",
      "Accepted tokens stay, and the rest is thrown away.")),
    ("the temperature",
     ("The temperature sets how freely the next token is chosen.",
      "Temperature controls how random the answer is."),
     ("At temperature 0 the most likely token is always taken.",
      "A low temperature gives safe answers, and a high one gives more surprising answers."),
     ("At a higher temperature the draft is right less often, so fewer tokens are accepted.",
      "The acceptance rate usually falls when the temperature rises.")),
    ("n-gram lookup",
     ("N-gram lookup guesses the next tokens by finding the last words earlier in the text.",
      "N-gram lookup is a draft without a model: it copies what followed the same words before."),
     ("It costs almost nothing and needs no memory on the graphics card.",
      "It is very cheap, because it only searches the text."),
     ("It works well when an answer repeats parts of the prompt, as in rewriting or code.",
      "It helps most when the answer copies from the question.")),
    ("the KV cache",
     ("The KV cache keeps what the model has already computed for earlier tokens.",
      "The KV cache is the memory of the attention layers for the text so far."),
     ("With it, each new token needs only one small step.",
      "Without it, the model would read the whole text again for every token."),
     ("When a guess is rejected, its entries are removed from the cache.",
      "It grows with the length of the chat and needs memory.")),
    ("VRAM",
     ("VRAM is the memory of the graphics card.",
      "VRAM means the memory on the GPU where the models are kept."),
     ("localspec reads how much is free and decides which models fit.",
      "The target, the draft and the KV cache all need a part of it."),
     ("If there is too little, localspec uses a smaller draft or none at all.",
      "A model that does not fit must be smaller or quantised.")),
    ("quantisation",
     ("Quantisation stores the weights of a model with fewer bits.",
      "To quantise a model means to keep its numbers in a smaller form, such as four bits."),
     ("The model becomes smaller and often faster, but a little less exact.",
      "It saves memory at the price of some accuracy."),
     ("A quantised copy can serve as the draft for the full model.",
      "localspec can use a quantised copy of the target as its own draft.")),
    ("a rejected token",
     ("A rejected token is a guess that the target did not accept.",
      "When a token is rejected, the target replaces it by its own choice."),
     ("All guesses after it are dropped as well.",
      "The tokens that come after it are thrown away."),
     ("So a wrong guess costs a little time but never changes the answer.",
      "Nothing wrong stays in the answer, only a little time is lost.")),
    ("localspec",
     ("localspec is a chat app that runs language models on your own computer.",
      "localspec is the app that you are using: a local chat with speculative decoding."),
     ("It picks a draft that fits your machine and adapts the draft length as it runs.",
      "It measures what is fastest on your machine and explains each choice."),
     ("The answers are the same as without it, only faster.",
      "It also keeps a record of each turn that you can export.")),
)  # fmt: skip

SPECIAL = (
    (("Does speculative decoding change the answer?", "Does the draft make the answer worse?",
      "Is the output the same?", "Do I lose quality?", "Is speculative decoding exact?",
      "Will the answers be different with a draft?"),
     ("No. The target checks every token, so the answer is the same as without the draft.",
      "No, the quality stays the same. Only tokens that the target accepts are kept.")),
    (("Why is it faster?", "Why is speculative decoding fast?", "Why does a draft help?",
      "How does the draft make it faster?", "Where does the speed come from?"),
     ("Checking several tokens takes the target about as long as writing one. When the guesses are "
      "right, one step gives several tokens.",
      "The target can check many tokens in one step. Each accepted guess saves a whole step of the "
      "large model.")),
    (("When does speculative decoding not help?", "When is a draft useless?", "Why is it not faster?",
      "Can it be slower?", "Can speculative decoding make it slower?"),
     ("It does not help when the guesses are often wrong or when the draft is too slow. Then "
      "localspec turns drafting off.",
      "If few tokens are accepted, drafting costs more than it saves. localspec measures this and "
      "stops drafting.")),
    (("Which draft should I use?", "How do I choose a draft model?", "What makes a good draft?",
      "What draft fits my model?"),
     ("A good draft is small, uses the same tokens as the target and comes from the same family. "
      "localspec picks one that fits.",
      "Use a small model of the same family. It must have the same tokens, and it should be much "
      "faster than the target.")),
    (("How can I make it faster?", "How do I get more speed?", "The answer is slow, what can I do?",
      "What can I do for a better speedup?"),
     ("Use a lower temperature, a smaller target or a better draft. Free memory on the graphics card "
      "also helps.",
      "Try a lower temperature or a draft that fits the target better, and close other programs that "
      "use the graphics card.")),
)  # fmt: skip


def explain(rng: Random) -> list[Exchange]:
    """Explain one term, sometimes with a follow-up for more detail."""
    term, what, how, why = rng.choice((DECODING, *TOPICS))
    user = rng.choice((
        f"What is {term}?", f"Explain {term}.", f"How does {term} work?", f"What does {term} mean?",
        f"Can you explain {term} to me?", f"Tell me about {term}.", f"Describe {term} briefly.",
        f"Explain {term} in simple words.", f"I do not understand {term}.", f"Define {term}.",
        f"What do you know about {term}?", f"Please explain what {term} is.",
        f"Explain {term} in two sentences.", f"What exactly is {term} in this app?",
    ))  # fmt: skip
    first = f"{usual(rng, term, what)} {usual(rng, term, how)}"
    if rng.random() < 0.3:
        more = rng.choice(
            (
                "Tell me more.",
                "And then?",
                "Go on.",
                "Why does it matter?",
                "Can you say more?",
                "What else?",
                "More details, please.",
            )
        )
        return [
            Exchange(casual(rng, user), first),
            Exchange(casual(rng, more), usual(rng, term, why)),
        ]
    return [Exchange(casual(rng, user), f"{first} {usual(rng, term, why)}")]


def questions(rng: Random) -> list[Exchange]:
    """Answer a practical question about drafting."""
    asked, answers = rng.choice(SPECIAL)
    return [Exchange(casual(rng, rng.choice(asked)), usual(rng, asked[0], answers))]


def compare(rng: Random) -> list[Exchange]:
    """Tell two terms apart."""
    first, second = rng.sample(TOPICS, 2)
    user = rng.choice(
        (
            f"What is the difference between {first[0]} and {second[0]}?",
            f"How do {first[0]} and {second[0]} differ?",
            f"Compare {first[0]} and {second[0]}.",
        )
    )
    return [
        Exchange(
            casual(rng, user),
            f"{usual(rng, first[0], first[1])} {usual(rng, second[0], second[1])}",
        )
    ]


def rate(rng: Random) -> list[Exchange]:
    """Work out an acceptance rate or a speedup from numbers."""
    if rng.random() < 0.5:
        drafted = rng.choice((4, 5, 10, 20, 50, 100))
        accepted = rng.randint(1, drafted)
        percent = round(100 * accepted / drafted)
        user = rng.choice(
            (
                f"The draft proposed {drafted} tokens and {accepted} were accepted. What "
                "is the acceptance rate?",
                f"{accepted} of {drafted} drafted tokens were accepted. What is the rate?",
            )
        )
        return [
            Exchange(
                user,
                f"The acceptance rate is {accepted} divided by {drafted}, which is "
                f"{percent} percent.",
            )
        ]
    plain, factor = rng.randint(2, 60), rng.randint(2, 4)
    user = rng.choice(
        (
            f"Without a draft I get {plain} tokens per second, with it {plain * factor}. "
            "What is the speedup?",
            f"Plain decoding gives {plain} tokens per second and drafting gives "
            f"{plain * factor}. How much faster is it?",
        )
    )
    return [
        Exchange(
            user,
            f"{plain * factor} divided by {plain} is {factor}, so it is {factor} times as fast.",
        )
    ]
