"""Small Python functions, one-line snippets and simple explanations of code.

Contract: skills as `shape.Skill`; every function in an answer compiles and does what the question
asks (tests run a sample).
"""

from __future__ import annotations

from random import Random

from tools.demo_pair.dialogues.shape import Exchange, ask
from tools.demo_pair.dialogues.words import NAMES

# task | suggested names (comma) | parameters | body, with {a}, {b} for the parameters and {f} for the name
FUNCTIONS = (
    ("adds two numbers", "add,add_numbers,sum_two", "a b", "return {a} + {b}"),
    ("subtracts one number from another", "subtract,difference,minus", "a b", "return {a} - {b}"),
    ("multiplies two numbers", "multiply,product,times", "a b", "return {a} * {b}"),
    ("divides two numbers", "divide,quotient", "a b", "return {a} / {b}"),
    ("returns the larger of two numbers", "larger,maximum,bigger", "a b", "return {a} if {a} > {b} else {b}"),
    ("returns the smaller of two numbers", "smaller,minimum", "a b", "return {a} if {a} < {b} else {b}"),
    ("squares a number", "square,squared", "n", "return {a} * {a}"),
    ("doubles a number", "double,twice", "n", "return 2 * {a}"),
    ("halves a number", "half,halve", "n", "return {a} / 2"),
    ("checks whether a number is even", "is_even,even,check_even", "n", "return {a} % 2 == 0"),
    ("checks whether a number is odd", "is_odd,odd,check_odd", "n", "return {a} % 2 == 1"),
    ("checks whether a number is positive", "is_positive,positive", "n", "return {a} > 0"),
    ("returns the absolute value of a number", "absolute,abs_value", "n", "return {a} if {a} >= 0 else -{a}"),
    ("reverses a string", "reverse,reverse_string,backwards", "text", "return {a}[::-1]"),
    ("makes a string upper case", "to_upper,shout,uppercase", "text", "return {a}.upper()"),
    ("makes a string lower case", "to_lower,lowercase", "text", "return {a}.lower()"),
    ("counts the words in a text", "count_words,word_count", "text", "return len({a}.split())"),
    ("counts the letters in a word", "count_letters,letter_count", "word", "return len({a})"),
    ("returns the first letter of a word", "first_letter,initial", "word", "return {a}[0]"),
    ("returns the last letter of a word", "last_letter", "word", "return {a}[-1]"),
    ("checks whether a word is a palindrome", "is_palindrome,palindrome", "word", "return {a} == {a}[::-1]"),
    ("counts the vowels in a text", "count_vowels,vowels", "text",
     'return sum(letter in "aeiou" for letter in {a}.lower())'),
    ("removes spaces from a text", "remove_spaces,strip_spaces", "text", 'return {a}.replace(" ", "")'),
    ("joins words with commas", "join_words,comma_list", "words", 'return ", ".join({a})'),
    ("adds up a list of numbers", "total,sum_list,add_all", "numbers", "return sum({a})"),
    ("returns the average of a list", "average,mean", "numbers", "return sum({a}) / len({a})"),
    ("returns the largest number in a list", "largest,find_max,max_of", "numbers", "return max({a})"),
    ("returns the smallest number in a list", "smallest,find_min", "numbers", "return min({a})"),
    ("sorts a list", "sort_list,sorted_list,sort_numbers", "items", "return sorted({a})"),
    ("reverses a list", "reverse_list,reversed_list", "items", "return {a}[::-1]"),
    ("removes duplicates from a list", "unique,remove_duplicates,dedupe", "items", "return list(dict.fromkeys({a}))"),
    ("counts the items in a list", "count_items,length,size", "items", "return len({a})"),
    ("returns the first item of a list", "first,first_item,head", "items", "return {a}[0]"),
    ("returns the last item of a list", "last,last_item", "items", "return {a}[-1]"),
    ("keeps the even numbers of a list", "even_numbers,keep_even", "numbers",
     "return [n for n in {a} if n % 2 == 0]"),
    ("squares every number in a list", "squares,square_all", "numbers", "return [n * n for n in {a}]"),
    ("greets a person", "greet,hello,say_hello", "name", 'return f"Hello, {{{a}}}!"'),
    ("computes the factorial of a number", "factorial,fact", "n",
     "if {a} <= 1:\n        return 1\n    return {a} * {f}({a} - 1)"),
    ("computes the n-th Fibonacci number", "fibonacci,fib", "n",
     "if {a} < 2:\n        return {a}\n    return {f}({a} - 1) + {f}({a} - 2)"),
    ("checks whether a number is prime", "is_prime,prime", "n",
     "if {a} < 2:\n        return False\n    for i in range(2, int({a} ** 0.5) + 1):\n"
     "        if {a} % i == 0:\n            return False\n    return True"),
    ("returns the greatest common divisor of two numbers", "gcd,common_divisor", "a b",
     "while {b}:\n        {a}, {b} = {b}, {a} % {b}\n    return {a}"),
    ("converts Celsius to Fahrenheit", "to_fahrenheit,celsius_to_fahrenheit", "celsius", "return {a} * 9 / 5 + 32"),
    ("computes the area of a rectangle", "area,rectangle_area", "width height", "return {a} * {b}"),
    ("counts how often an item is in a list", "count,occurrences", "items item", "return {a}.count({b})"),
    ("checks whether an item is in a list", "contains,is_in", "items item", "return {b} in {a}"),
)  # fmt: skip
RENAMED = {"a": ("a", "x", "first", "left"), "b": ("b", "y", "second", "right"), "n": ("n", "number", "value"),
           "text": ("text", "s", "string"), "word": ("word", "text"), "numbers": ("numbers", "values", "items"),
           "items": ("items", "values", "data")}  # fmt: skip


def function(rng: Random) -> list[Exchange]:
    """Ask for a small function, with or without a given name; sometimes ask for a call of it."""
    task, names, parameters, body = rng.choice(FUNCTIONS)
    name = rng.choice(names.split(","))
    chosen = [rng.choice(RENAMED.get(one, (one,))) for one in parameters.split()]
    if len(set(chosen)) < len(chosen):
        chosen = parameters.split()
    slots = {"a": chosen[0], "b": chosen[-1], "f": name}
    code = f"def {name}({', '.join(chosen)}):\n    {body.format(**slots)}"
    wanted = rng.choice(
        (
            "write a Python function that",
            "write a function that",
            "make a Python function that",
            "show me a Python function that",
            "give me a short function that",
        )
    )
    named = f" and call it `{name}`" if rng.random() < 0.4 else ""
    user = ask(rng, f"{wanted} {task}{named}")
    if rng.random() < 0.3:
        head = rng.choice(("", "", "from typing import List\n\n\n"))
        user = f'{head}def {name}({", ".join(chosen)}):\n    """{task.capitalize()}."""\n'
    lead = rng.choice(("", "", f"This function {task}:\n\n"))
    exchanges = [Exchange(user, f"{lead}```python\n{code}\n```")]
    if rng.random() < 0.25:
        exchanges.append(
            Exchange(
                rng.choice(
                    ("What does it do?", "Explain the code.", "Explain it.", "How does it work?")
                ),
                f"The function `{name}` {task}. It takes {' and '.join(f'`{one}`' for one in chosen)}.",
            )
        )
    return exchanges


def snippet(rng: Random) -> list[Exchange]:
    """Ask for a line or a loop."""
    count, name = rng.randint(3, 20), rng.choice(NAMES)
    user, code = rng.choice((
        (f"print the numbers from 1 to {count} in Python", f"for n in range(1, {count + 1}):\n    print(n)"),
        (f"print hello {count} times in Python", f'for _ in range({count}):\n    print("hello")'),
        (f"print the name {name} in Python", f'print("{name}")'),
        (f"make a Python list of the numbers from 1 to {count}", f"numbers = list(range(1, {count + 1}))"),
        ("write a hello world program in Python", 'print("Hello, world!")'),
        ("read a file in Python", 'with open("file.txt") as file:\n    text = file.read()'),
        ("read a number from the user in Python", 'number = int(input("Number: "))'),
        (f"make a dictionary with the name {name} in Python", f'person = {{"name": "{name}"}}'),
        (f"write a while loop that counts to {count} in Python",
         f"n = 1\nwhile n <= {count}:\n    print(n)\n    n += 1"),
    ))  # fmt: skip
    return [Exchange(ask(rng, user), f"```python\n{code}\n```")]
