"""The final answer of a text: a number, a choice, a time, a date or an expression, and whether two are equal.

`equals("2 + 3 = 5, so #### 5", "5.0")` is True. The rules are those of `score.math_answer`. A text that could be read
in two ways has no answer, since a wrong number must never score.
"""

import re
from fractions import Fraction
from functools import lru_cache

from penstock.nodes import symbolic_math
from penstock.nodes.data_files import FINAL

# Words that multiply the number before them.
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# An optional group is left out only where it does not match. It is not possessive, `(?:…)?+`: before Python 3.11.5 such
# a group may fail, and with it the number, where there is a choice in it (python/cpython#106052).
_DIGITS = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?!,[0-9]{3})|[0-9]++)(?:\.[0-9]++|(?!\.[0-9]))|\.[0-9]++)"
    r"(?:[eE][+-]?[0-9]++|(?![eE][+-]?[0-9]))"
)
_MONEY = r"(?:[A-Z]{0,2}[$€£¥₹₩₽]|(?:USD|EUR|GBP|Rs\.?)\s?)"
# Possessive, so that no part of "12,34" or "1.2.3" is taken for a number. A minus belongs to the number unless it
# follows something to subtract from.
_NUMBER = re.compile(
    rf"""(?P<sign>(?:(?<![\w.)−-])(?:[−-]\s?|–){_MONEY}?|{_MONEY}[−-]?)?)
    (?:(?<![0-9.])|(?<=Rs\.))(?<![0-9][,/eExX])
    (?:(?P<whole>[0-9]++)\s++(?=[0-9]++/[0-9])|(?![0-9]++\s++[0-9]++/[0-9]))
    (?P<top>{_DIGITS})(?:\s?/\s?(?P<bottom>[−-]?{_DIGITS})|(?!\s?/\s?[−-]?\.?[0-9]))
    (?!\s?/\s?[−-]?[0-9]|[.,]?[0-9]|[xX][0-9a-fA-F])
    (?:\s*+(?P<scale>{"|".join(_SCALES)})s?\b)?""",
    re.VERBOSE,
)
# A number with more digits, or a larger exponent, counts as none: Python refuses to read more than 4,300 digits.
_MOST_DIGITS = 4_000
# A lookbehind for this many digits, which begin a number or follow a space in one.
_HEAD = "(?<=(?<![0-9.,])[0-9]{{{}}})"
_FRACTIONS = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅛": "1/8"}
# How LaTeX writes a number, and its plain form; applied in this order.
_LATEX = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\!\s*|\\(?:left|right|displaystyle)\b|[\u200b-\u200d\u2060\ufeff]", ""),
        (r"[\u2010-\u2012\ufe63\uff0d]", "-"),
        *((rf"([0-9]?)\s?{sign}", rf"\1 {plain} ") for sign, plain in _FRACTIONS.items()),
        (r"(^|[=($:{,] ?)([−-])\s+(?=\\[dt]?frac)", r"\1\2"),
        (r"(?<![A-Za-z])([cdkm]?m|ft|yd|mi|in)[23](?![\w.])", r"\1"),
        # A mark of a list or a minus; a dash between words or a minus.
        (rf"(?<=\n)[ \t]*-[ \t]+(?={_MONEY}?[0-9.])|(?<!\S)—(?={_MONEY}?[0-9.])", "≈"),
        # Emphasis of Markdown, and JSON.
        (r"(?<![\w^)}\]$∫])(__?)([^_\n]{1,40})\1(?!\w)", r" \2 "),
        (r"\{(\s?\"[^{}\n]{1,80})\}", r"\1"),
        (r"(?<=[0-9])\s?\.{2,3}(?=\s?[0-9])", " … "),
        (r"(?<=[0-9])~(?=[0-9]{1,2}(?![0-9]))", "-"),
        (r"\\q?quad\b", "  "),
        (r"(?:\^\s*+\{?+\s*+\\circ\s*+\}?|°)(?:\s*+(?:\\(?:text|mathrm)\s*\{\s*[CF]\s*\}|[CF]\b))?", ""),
        (r"\{,\}|(?<=[0-9])\\,(?=[0-9]{3})", ","),
        (r"\\[dt]?frac\s*\{\s*([−-]?[0-9.,]+)\s*\}\s*\{\s*([−-]?[0-9.,]+)\s*\}", r" \1/\2 "),
        (r"\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*([0-9])|\\[dt]?frac\s*([0-9])\s*\{?([0-9]+)\}?", r" \1\3/\2\4 "),
        (r"\\(?:text|mathrm|mbox|textbf|mathbf|underline)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\([$%])", r"\1"),
        (r"</?[A-Za-z]\w{0,20}>", " "),
        (r"(?<![^\s(=$])~(?=\s?[$0-9.])", "≈"),
        (r"\\[,;: ()\[\]]|~|[\u00a0\u2009\u202f]", " "),
        (r"(?:(?<=[A-Za-z]{2})|(?<=[\s/]m)|(?<=/s))\s*+(?:\^\s*\{?[23]\}?(?![0-9])|[²³])", ""),
        # Thousands with a separator, such as 12 600 or 12'600.
        (rf"(?:{'|'.join(_HEAD.format(n) for n in (1, 2, 3))})[ '’](?=[0-9]{{3}}(?![0-9]|\s?/))", ","),
    )
]
# "5 200 dollar notes" may be 5,200 notes or five: the text does not tell. "5 200 dollars in all" and "5 200 in total"
# have one reading: a plural is no unit of something else, and words such as "in" are neither a unit nor counted.
_NOT_COUNTED = r"(?!(?:a|an|and|are|as|at|but|by|each|for|from|if|in|is|of|on|or|per|so|than|that|the|to|which|with)\b)"
_TWO_READINGS = re.compile(
    r"(?<![0-9.,$€£])(?<![0-9] )[0-9]{1,3} [0-9]{3}"
    rf"(?=(?:\.[0-9]+)?(?:\s?%| ?-?{_NOT_COUNTED}(?![A-Za-z]*s\b)[A-Za-z]+)[ -]{_NOT_COUNTED}[A-Za-z])"
)
# What makes a number a part of an expression, with examples for the number 3. `_BEFORE` ends before it, `_AFTER` begins
# after it. Marks of Markdown have a space on one side (*Step 2* 3), operators on none or on both. "At least 3" and "at
# most 3" may be all of an answer.
_FUNCTIONS = "sqrt|log|ln|sin|cos|tan"
_FRACTION_WORDS = (
    "halves|thirds|(?:third|quarters?)(?= of)|(?:fourth|fifth|sixth|seventh|eighth|ninth)s"
    "|(?:tenth|hundredth|thousandth|millionth)s?"
)
# In 5!=120 the mark belongs to the 5.
_UNEQUAL, _EQUAL = r"!=(?<![\w)}\]]!=)", re.compile(r"(?<![^\w)}\]]!)(?<![<>])=")
# After these words a dash or a plus is a sign; after others, and what else ends a term, an operator.
_NO_TERM = r"(?!(?i:is|are|was|were|be|equals?|gives?|gave|makes?|gets?|and|or|to|of|by)\b)"
_TERM = rf"(?:(?<![\w'’]){_NO_TERM}[\w'’]+|[\]}}²³!%]|[0-9]\)|\w\||\([^()\n]*\))"
# An unknown is a letter by itself. After a dash, "a" and "I" begin a sentence; after a slash, a unit may follow.
_ONE_LETTER = r"(?<![A-Za-z'’])[A-Za-zΑ-Ωα-ω]"
_LETTER_AFTER = r"[A-Za-zΑ-Ωα-ω](?![\w'’])"
_OPERATOR = r"(?:[*×·⋅÷/](?!(?<=/)(?i:[dghlmsw])\b)|[−–-](?![ \t]*[aAI]\b))"
_BEFORE = (
    r"[\^_{√∛∜]",  # 2^3, √3
    r"[0-9]\*\*",
    r"\\[A-Za-z]+",
    rf"(?:{_FUNCTIONS})\s*\(",
    r"[0-9][)}]*[ \t]+(?i:times|plus|(?:divided|multiplied) by)(?=[ \t]+[−-]?\s*$)",
    r"[0-9][ \t]?(?:%|(?i:percent))[ \t]+of",  # 20% of 3
    r"[0-9][ \t]{1,2}(?i:mod|choose)",
    rf"[0-9][ \t]?(?i:{'|'.join(_SCALES)})s?(?: and)?(?=[ \t]+$)",  # 4 hundred 3
    rf"\b(?i:minus|negative|twice|half|double|root|{_FUNCTIONS})(?i:\s+of)?",
)
# The same, where marks of Markdown or of LaTeX may be between: "than **3**".
_BEFORE_MARKS = (
    r"[±≈≠≤≥≦≧⩽⩾]|\\(?:[lg](?:t|eq?|eqslant)|neq?)(?![A-Za-z])",
    _UNEQUAL,
    r"(?i:\bnot|n['’]t|\bcannot)(?:\s+(?:be|equals?))?(?:\s+to)?",
    r"(?:^\s*|\b(?:is|are|was|be|has|takes?)\s+)(?i:over|under|above|below|up to)",
    r"\b(?i:than|about|approximately|approx\.?|roughly|around|nearly|almost)",
)
# The same again. They take longer, so they are apart, and looked for only if one of their signs is there.
_SIGNS = "*×·⋅÷+/<>"
_BEFORE_SIGNS = (
    r"\+/",  # +/- 3
    r"[\w)}²³%][)}$]*[*×·⋅÷+/](?!\s)(?=[−-]?\s*\Z)",  # 2*3, x/3
    rf"{_TERM}[*_`$]*[ \t]+[*×·⋅÷+/](?=[ \t])",  # 2 * 3, x + 3
    r"<(?<!<<)=?",  # < 3, but not <<3>>
    # x > 3, but not "=> 3", nor the 3 after <<1+2=3>>; at the start of a line, except the first, it is a quotation.
    r"(?:[\w)}$]\s*|[^\s>=/|\"'~−–-][ \t]*|^\s*|\n[ \t]*(?=>=))>=?",
)
# The same, with nothing between.
_RIGHT_BEFORE = (
    r"[−–-](?<![\w.)][−–-])(?:[(\[{|`_*]+| \()\s?",  # -(3), -**3**
    r"\*\*[−–-]\*\*",
    r"(?:\b[fgh]|floor|ceil|abs|gcd|lcm|min|max)\(",  # f(3)
    r"[0-9]\)\s?\(|[0-9]\)[−–-]",  # (1/2)(3), (1/2)-3
    rf"\((?:(?<=[0-9]\()|(?<=\w_\()|(?<=[\w)]\*\()|(?<={_ONE_LETTER}\())",  # 2(3), x*(3), x(3)
    r"(?:[\^√∛∜±≈≠≤≥/×·⋅÷+−–-]|[<>](?<![>=−–-].)=?|\\[A-Za-z]+)\s*\(",  # x + (3)
    r"[0-9]{4}-[0-9]{1,2}-",  # 2024-05-03
)
_AFTER = (
    r"!",
    r"\s*(?:[\^_{}]|\\|\*\*\s*[0-9(]|[√π])",  # 3^2, 3\pi, 3 ** 2
    r"[ijkKMBTnxyz]\b|[¹²³⁰⁴-⁹₀-₉½⅓⅔¼¾⅛]",  # 3i, 3k, 3²
    r"-?ish\b",
    # 3 + x, 3*x, 3/x, but not 3/h; 3 x; 3(x + 1); 3 < x
    r"\$?[ \t]*\+",
    rf"(?:{_OPERATOR}|[ \t]+{_OPERATOR}[ \t]+)(?:{_LETTER_AFTER}|\\[A-Za-z])",
    r"[ \t]*[×·⋅÷/][ \t]*\(|[ \t]+[ixyz](?=[ \t.$)\]]{0,9}(?:\n|\Z))|\([A-Za-z][ \t]*[+*/^−-]",
    rf"[ \t]*\$?[ \t]*(?:[≠≤≥≦≧⩽⩾]|[<>]=?[ \t]*{_LETTER_AFTER}(?!>))",
    rf"\s*(?:squared|cubed|factorial|pi|{_FRACTION_WORDS}|[bm]n|lakhs?|crores?)\b",
    rf"[ \t]+(?:or[ \t]+(?:more|less|fewer|so)|and[ \t]+(?:a|one)[ \t]+(?:half|quarter|{_FRACTION_WORDS}))\b",
    rf"(?:{'|'.join(rf'(?<=[.][0-9]{{{n}}})' for n in range(1, 9))})(?:\.\.|…)",  # 0.333...
)
_ANY = re.compile("")
# A number is a part of an expression if all three of a row match: what ends before it, itself, what begins after it.
_WITHIN = (
    (
        re.compile(
            rf"(?:{'|'.join(_BEFORE)})\s*[−-]?\s*$|(?:{'|'.join(_BEFORE_MARKS)})[\s*_`$]*[−-]?\s*$"
            rf"|(?:{'|'.join(_RIGHT_BEFORE)})$"
        ),
        _ANY,
        _ANY,
    ),
    (
        re.compile(rf"\A(?s:(?=.*[{_SIGNS}][\s*_`$=−-]*\Z).*?)(?:{'|'.join(_BEFORE_SIGNS)})[\s*_`$]*[−-]?\s*\Z"),
        _ANY,
        _ANY,
    ),
    (_ANY, _ANY, re.compile("|".join(_AFTER))),
    # "Between five and 10", "a third of 10", "x-10".
    (
        re.compile(
            rf"\b(?i:between)\b[^\n.;:=]*\band[\s*_`$]+$|(?:/[0-9]+|\b(?:{_FRACTION_WORDS}))[ \t]+of[ \t]+$"
            r"|(?<![A-Za-z'])[b-zB-Z][−-]\$?$"
        ),
        _ANY,
        _ANY,
    ),
    # A dash with spaces around it, "Answer - 12" or "f(x) - 12", may be a mark or a minus; "x is - 12" has a minus.
    (
        re.compile(rf"(?:(?<![\w'’]){_NO_TERM}[\w'’]+|[)\]}}|²³!'’%:])[*_`$]*[ \t]+$"),
        re.compile(r"[−-]\s"),
        _ANY,
    ),
    # The minutes of a time, "at 10:30", the fraction of "2 and 3/4", and |-5|, whose value is 5.
    (re.compile(r"\b(?:at|is|by|until) (?:[01]?[0-9]|2[0-3]):$"), re.compile(r"[0-5][0-9]\Z"), _ANY),
    (re.compile(r"[0-9][ \t]and[ \t]$"), re.compile(r".+/", re.DOTALL), _ANY),
    (re.compile(r"(?<![A-Za-z]{2})\|$"), re.compile(r"\D*[−–-]"), _ANY),
    # (3)^2, (3)x, (3)(4), (3) + 1, and the 3 of (2, 3).
    (
        re.compile(r"\(\s?$"),
        _ANY,
        re.compile(rf"\s?\)\s?\$?(?:{'|'.join(_AFTER)}|\(|\s?[*×·⋅÷/−–-]\s?[0-9(]|\s?(?:{'|'.join(_SCALES)})s?\b)"),
    ),
    (re.compile(r"[(\[](?:\s?[−–-]?[0-9./]+\s?,)+\s*$"), _ANY, re.compile(r"\s?[)\]]")),
)
# Units of each quantity, from the largest to the smallest; forms of one unit, without the "s" of a plural, have "/".
_UNITS_BY_SIZE = (
    "year/yr month/mo week/wk day/d hour/hr/h minute/min/m second/sec/s",
    "mile/mi kilometer/kilometre/km yard/yd meter/metre/m foot/feet/ft/' inch/inche/in/\" centimeter/cm millimeter/mm",
    "ton/tonne/t kilogram/kilo/kg pound/lb ounce/oz gram/g milligram/mg",
    "gallon/gal quart/qt pint/pt cup liter/litre/l milliliter/millilitre/ml",
    "dollar/pound/euro/$/£/€ cent/penny/pennie/pence/¢",
    "percent/%",
)
_PERCENT = {_UNITS_BY_SIZE[-1]: 0}
# What may join two numbers, with the unit of the first before it; marks and currency are taken out before.
_MARKS = re.compile(rf"[*_`{{}}\\]|{_MONEY}")
_BETWEEN = re.compile(
    rf"""[ \t]*(?P<unit>[%'"¢]|{_NOT_COUNTED}[a-z]+)?(?:[ \t]+{_NOT_COUNTED}[a-z]+(?=.*(?:[−–—-]|\b(?:or|to)\b)))?
    (?:[ \t]*(?P<dash>[−–—-]+|…)[ \t]*\(?|,?\s*-?\b(?P<word>or|to)\b-?\s*(?:(?P<unknown>[a-z])\s*=\s*)?
    |[ \t]*(?P<part>,|and\b|)[ \t]*)[−–-]?""",
    re.VERBOSE | re.IGNORECASE,
)
_UNIT_AFTER = re.compile(r"[ \t*_`$-]{0,9}([%'\"¢]|[A-Za-z]+)")
_SENTENCE_END = re.compile(r"[.!*_`$)]*\s*(?:\n|\Z)")
# Before a number: what makes it the last of an expression, whose value may follow ("$30 + $160 or $190"), and the name
# of an unknown; that in "2x = 10, or x = 5" is a part of an equation.
_OPERATED = re.compile(
    r"(?:\w[ \t]*[+/×÷^]|[0-9)%](?:[*−-]|[ \t]+[*−-][ \t]+)|\\sqrt|√"
    r"|\b(?:of|times|plus|minus|less|by|over|x|twice|half)[ \t]+)[ \t{$]*$"
)
_CHANGE = re.compile(
    r"\b(?:round|increas|decreas|ris|rose|drop|fell|fall|grew|grow|went|go|chang|add|reduc|rais)\w*\b[^.\n]*$"
)
_NAMED = re.compile(r"(?<![\w+/−-])(?<![+/−-] )([A-Za-z])\s*=[\s$]*$")
_MINUS = re.compile("[−–-]")
# What makes the first number after "####" a part of more than a number, besides the next number (see `_joined`).
_GOES_ON = re.compile(
    r"[ \t]*+(?:\+|[*×·÷<>≈] ?[−$(-]*[0-9\\]|[,;] ?[−$-]*[0-9]|:[0-9]|(?:%|percent)[ \t]+of[ \t]"
    r"|(?<!\w)(?:(?:and|x|mod|choose|times|plus|minus|R|remainder)[ \t]+[−$(-]*[0-9]|[ixyz][ \t.]*$))|[ \t]+[0-9]",
    re.MULTILINE,
)
# The same of a box, such as \boxed{3}^2, 2\boxed{3}, \sqrt{\boxed{3}} or -\boxed{3}. Degrees are a unit.
_OPERATORS = r"\\(?:cdot|times|div|pm|mp)(?![A-Za-z])|[×·÷±√]"
_AROUND_BOX = (
    re.compile(
        rf"(?:(?:{_OPERATORS}|[\^_]\s*\{{?|[0-9)}}]\s*[*/+]|[0-9=($)}}]\s*[−-]|\\?\b(?:{_FUNCTIONS})\s*[({{]?"
        # x > \boxed{3}, x + \boxed{3}; but x \ge \boxed{3} is how a least value is told
        rf"|[<>](?:(?<=[\w)}}$].)|(?<=[\w)}}$] .))|[/+−-](?:(?<={_ONE_LETTER}.)|(?<={_ONE_LETTER} .))"
        rf"|\\(?:sqrt(?:\[[0-9]\])?|[dt]?frac(?:\{{[^{{}}]*\}})?)\s*\{{"
        rf"|\b(?i:not|than|about|approximately|roughly|minus|negative)|\\boxed\{{[^{{}}]*\}}\$?\s+or\s+\$?)\s*|[0-9−-])$"
    ),
    re.compile(
        rf"[!0-9]|\.[0-9]|[ijkKMBTnxyz]\b|\s*+(?:{_OPERATORS}|\^\s*+\{{?\s*+[0-9A-Za-z+−-]|_\s*+\{{?\s*+[0-9]|[/+−-]\s*[0-9\\]|[¹²³⁰⁴-⁹π]"
        rf"|\*\s*[0-9]|\*\*[0-9]|\\(?:{_FUNCTIONS}|pi|[dt]?frac)(?![A-Za-z])"
        rf"|\$?\s*[/+−-]\s*(?![aAI]\b|(?<=/)(?i:[dghlmsw])\b){_LETTER_AFTER}"
        rf"|\$?\s*(?:{'|'.join(_SCALES)}|squared|cubed|factorial|(?:is|was)\s+(?:not|wrong|incorrect|false))\b)"
    ),
)
# Words that deny a number in a box, before or after it.
_DENIED = re.compile(r"\b(?:not|than|or|except|wrong|incorrect|false)\b")
# A time with its half of the day, and dates: algebra and numbers with units would find others equal to them.
_MONTHS = (
    "Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    "|Nov(?:ember)?|Dec(?:ember)?"
)
_DAY, _YEAR = r"(?P<{}>[0-3]?[0-9])(?:st|nd|rd|th)?(?![0-9])", r"(?:,?\s+(?P<{}>[0-9]{{4}})(?![0-9]))?"
_STAMP = re.compile(
    r"(?<![0-9:.,])(?P<hour>1[0-2]|0?[1-9])(?:\s?:\s?(?P<minute>[0-5][0-9]))?\s*(?P<half>[AaPp])(?:\.\s?)?[Mm]\b\.?"
    r"|(?<![0-9-])(?P<iso>[0-9]{4}-[01][0-9]-[0-3][0-9])(?![0-9-])"
    r"|(?<![0-9/])(?P<slashed>[0-3]?[0-9]/[0-3]?[0-9]/[0-9]{4})(?![0-9/])"
    rf"|(?<![A-Za-z\\])(?P<month>{_MONTHS})\.?\s+{_DAY.format('day')}{_YEAR.format('year')}"
    rf"|(?<![0-9]){_DAY.format('first')}\s+(?:of\s+)?(?P<then>{_MONTHS})(?![A-Za-z]){_YEAR.format('after')}"
)
# The name of a choice, and where a response without a box names its own.
_CHOICE = re.compile(r"\(?([A-Z])\)?")
_CHOSEN = re.compile(
    r"\b[Aa]nswer(?:\s+is|\s*:)[\s$*(]*(?:\\(?:text|mathrm|mathbf)\s*\{\s*)?\(?([A-Z])(?![\w'])(?!\)?\s*(?:[,/]|or\b|and\b))"
)
# A list in brackets, which say whether its order counts.
_LIST = re.compile(r"\s*\$?\s?(?:\\left)?(\(|\\\{)([^(){}\[\]]*)(?:\\right)?(?:\)|\\\})\s?\$?\s*")
# Before a "=" in a box: another unknown.
_UNKNOWN = re.compile(r",\s*\\?[A-Za-z]\w{0,9}\s*$")
# A range, which algebra would subtract.
_RANGE = re.compile(r"(?<![\w.,-])([0-9][0-9.,]*)\s?%?\s?[−–—-]+\s?[$€£]?([0-9](?:[0-9.,]*[0-9])?)(?![\w-])")
# Characters before a number that are searched for its expression; bounded, so that no text takes long.
_NEAR = 40
# What may be around a number that is an answer by itself: currency, words and units.
_UNITS = re.compile(r"[$€£%.\s]|(?<![A-Za-z])(?:[A-Za-z]{2,}|[gmshLNJWV])(?:[23]|\b)(?:/[A-Za-z]+)?")
# An answer by itself that is in parentheses.
_BRACKETED = re.compile(r"\$?\(([^(),]*+)\)\$?")
# A power of ten after a number that is an answer by itself.
_TEN = re.compile(r"(?<=[0-9])\s*(?:\\times|\\cdot|[×·*])\s*10\s*\^\s*(?:\{\s*([−-]?[0-9]+)\s*\}|([−-]?[0-9]+))")
# A text in which there is nothing of `_LATEX`.
_BARE = re.compile(r"[ \n]?[0-9]*+[ \n]?")
# Digits with their base.
_BASE = re.compile(r"([0-9A-Z]+)_\{?([0-9]+)\}?")


def comparable(answer: str) -> Fraction | None:
    """The number that a reference answer is (see `number_of`); None for an answer that math-verify compares.

    Raises ValueError for an answer that cannot be compared.
    """
    number = number_of(answer)
    missing = symbolic_math.lack() if number is None else ""
    if missing or not _final_part(answer).strip():
        raise ValueError(
            f"given the reference answer {answer!r:.200}, needed a number, or {missing or 'another answer'}"
        )
    return number


def equals(response: str, answer: str) -> bool | None:
    """True if the final answer of a response is the reference answer, by the rules of `score.math_answer`; None where
    math-verify has no verdict within `symbolic_math.DEADLINE_S` seconds. Raises ValueError as `comparable` does.
    """
    needed = comparable(answer)
    if (stamp := _stamp(_final_part(answer))) is not None:
        told = _stamp(_final_part(response), like=stamp)
        # A year may be left out.
        if told is not None:
            return all(given == own for given, own in zip(told, stamp, strict=False))
        # Without a stamp the answer may be its number alone; a date of numbers is no expression.
        if stamp[0] in ("iso", "slashed"):
            return False
    if needed is not None:
        return final_number(response) == needed
    if (own_range := _range_of(answer)) is not None:
        return _range_of(response, whole=False) == own_range
    if response.strip() == answer.strip():  # math-verify finds no word without marks around it
        return True
    boxed, given = _last_boxed(response), _final_part(response).strip()
    # Of a set it makes the point with these coordinates.
    told_list, own_list = _LIST.fullmatch(given), _LIST.fullmatch(_final_part(answer))
    if told_list and own_list and told_list[1] != own_list[1] and "," in told_list[2] and "," in own_list[2]:
        return False
    choice = _CHOICE.fullmatch(_without_latex(answer).strip())
    if boxed is None and choice and _CHOSEN.findall(response)[-1:] == [choice[1]]:
        return True
    # Nor does it find LaTeX without marks.
    if boxed is None and FINAL in response and not re.search(r"\$|\\[(\[]", given):
        given = boxed = given.partition("\n")[0].rstrip(" .")
    # math-verify ignores a base.
    if digits := _BASE.fullmatch(_without_latex(answer).strip()):
        return digits.groups() in [found.groups() for found in _BASE.finditer(_without_latex(given))][-1:]
    return symbolic_math.grader().equal(answer, given if boxed is None else rf"\boxed{{{boxed}}}")


# All responses of a group are compared with one answer.
@lru_cache(maxsize=1024)
def number_of(answer: str) -> Fraction | None:
    """The number that a reference answer, its box, or the text after its "####" is; None if that is not one number
    alone."""
    return _only(_final_part(answer))


def _final_part(text: str) -> str:
    boxed = _last_boxed(text)
    return text.rpartition(FINAL)[2] if boxed is None else boxed


def final_number(text: str) -> Fraction | None:
    """The number that a text ends with (see `math_answer`); None if there is none."""
    boxed = _last_boxed(text)
    if boxed is not None:
        *sides, last = _EQUAL.split(boxed)
        return None if any(map(_UNKNOWN.search, sides)) else _only(last)
    plain = _without_latex(_TWO_READINGS.sub(r"≈\g<0>", text.rpartition(FINAL)[2]))
    matches = list(_NUMBER.finditer(plain))
    if not matches:
        return None
    place = 0 if FINAL in text else len(matches) - 1
    if FINAL in text and _is_continued(matches, 0):
        # 5 + 3 = 8
        begin = matches[0].start()
        line = begin + len(plain[begin:].partition("\n")[0])
        equal = plain.rfind("=", begin, line)
        place = next((i for i, match in enumerate(matches) if 0 <= equal < match.start() < line), 0)
        if not place or _is_continued(matches, place):
            return None
    match = matches[place]
    # A text that ends with an expression does not end with a number in it.
    return None if _is_within(match) or (place and _joined(matches[place - 1], match)) else _value(match)


def _range_of(text: str, *, whole: bool = True) -> tuple[str, str] | None:
    """The ends of the range that the final part of a text is, or, unless `whole`, ends with; None without one."""
    plain = _without_latex(_final_part(text)).strip(" \n\t$%.")
    *_, match = [None, *_RANGE.finditer(plain)]
    if match is None or (whole and match[0] != plain):
        return None
    return match[1].replace(",", ""), match[2].replace(",", "")


def _is_continued(matches: list[re.Match[str]], place: int) -> bool:
    """True if what follows this number of a text makes it a part of more than a number."""
    match, after = matches[place], matches[place + 1 : place + 2]
    return bool(_GOES_ON.match(match.string, match.end())) or any(_joined(match, other) for other in after)


def _joined(one: re.Match[str], other: re.Match[str]) -> bool:
    """True if two numbers in a row, with but a unit and a word or a dash between them, are a range, a choice or one
    quantity: "5-10", "x = 5 or x = 10", "5 hours 30 minutes". "0.05 or 5%", "4.67 to 5" and "60 minutes or 1 hour" are
    one number, told twice."""
    text = one.string
    # What looks like a sign may be a dash.
    between = text[one.end() : other.start()] + other["sign"]
    found = _BETWEEN.fullmatch(_MARKS.sub("", between)) if len(between) <= _NEAR else None
    if found is None or between.isspace():
        return False
    after = _UNIT_AFTER.match(text, other.end())
    left = _sizes(found["unit"] or _MINUS.sub("", one["sign"]))
    right = _sizes(after[1] if after else _MINUS.sub("", other["sign"]))
    shared = left.keys() & right.keys()
    if found["part"] is not None:
        # A comma may begin another thought: "After 1 hour, 5 minutes remain."
        whole = found["part"] != "," or (after and _SENTENCE_END.match(text, after.end()))
        return bool(whole) and any(left[quantity] < right[quantity] for quantity in shared)
    same = any(left[quantity] == right[quantity] for quantity in shared)
    # A word is surely a unit if it comes twice, unlike those in "5 adds up to 10" and "Day 2: total - 10".
    is_unit = same or not (found["unit"] or "").isalpha()
    if found["dash"]:
        return is_unit or bool(shared)
    if (left and right and not same) or not (is_unit or found["word"].lower() == "or"):
        return False
    before = text[max(0, one.start() - _NEAR) : one.start()]
    # "Rounds 47 to 50", "from 4 to 12": a change, which has an end.
    if found["word"].lower() == "to" and _CHANGE.search(before):
        return False
    named = _NAMED.search(_MARKS.sub("", before))
    if (
        _OPERATED.search(before)
        or found["unit"] in ("squared", "cubed")
        or (found["unknown"] and (named is None or named[1] != found["unknown"]))
    ):
        return False
    first, second = _value(one), _value(other)
    if first is None or second is None:
        return True
    # "0.5 or 50%"
    if (left == _PERCENT) != (right == _PERCENT):
        first, second = (first / 100, second) if left == _PERCENT else (first, second / 100)
    notations = {("/" in match[0], "." in match[0]) for match in (one, other)}
    return not (first == second or (len(notations) == 2 and abs(first - second) < 1))


def _sizes(unit: str) -> dict[str, int]:
    """The place of a unit, from the largest, in each quantity that has it; any other word is a quantity of its own."""
    word = unit.strip().lower()
    one = word.rstrip("s") if len(word) > 2 else word
    found = {
        quantity: place
        for quantity in _UNITS_BY_SIZE
        for place, forms in enumerate(quantity.split())
        if {word, one} & {*forms.split("/")}
    }
    return found or ({one: 0} if word and re.match(_NOT_COUNTED, word) else {})


def _stamp(text: str, like: tuple[str, ...] = ()) -> tuple[str, ...] | None:
    """The time or date that a reference answer is; with `like`, the last one of that kind in a text. None without."""
    plain = _without_latex(text)
    found = list(_STAMP.finditer(plain)) if like else [_STAMP.fullmatch(plain.strip(" .$"))]
    stamps = [_fields(match) for match in found if match is not None]
    return next((stamp for stamp in reversed(stamps) if not like or stamp[0] == like[0]), None)


def _fields(match: re.Match[str]) -> tuple[str, ...]:
    """The kind of a time or date, and its parts."""
    if match["hour"]:
        return "time", str(int(match["hour"])), match["minute"] or "00", match["half"].lower()
    if match["iso"] or match["slashed"]:
        kind, said = ("iso", match["iso"]) if match["iso"] else ("slashed", match["slashed"])
        return kind, *(str(int(part)) for part in re.split("[-/]", said))
    year = match["year"] or match["after"]
    day = "day", (match["month"] or match["then"])[:3], str(int(match["day"] or match["first"]))
    return (*day, year) if year else day


def _only(text: str) -> Fraction | None:
    """The number that a text is, if only units are beside it; else None."""
    plain = _without_latex(text).strip().removeprefix("+")
    if plain[:1] == "{" and plain[-1] == "}" and plain[-2] != "\\":
        plain = plain[1:-1]
    # (1,234) may be a point.
    if alone := _BRACKETED.fullmatch(plain):
        plain = alone[1].strip()
    # After a fraction the power would be a part of the denominator.
    if (ten := _TEN.search(plain)) and "/" not in plain[: ten.start()]:
        plain = f"{plain[: ten.start()]}e{(ten[1] or ten[2]).replace('−', '-')}{plain[ten.end() :]}"
    matches = list(_NUMBER.finditer(plain))
    if len(matches) != 1 or _is_within(matches[0]):
        return None
    (match,) = matches
    rest = plain[: match.start()], plain[match.end() :]
    return None if any(_UNITS.sub("", part) or _DENIED.search(part) for part in rest) else _value(match)


def _is_within(match: re.Match[str]) -> bool:
    """True if this number is a part of an expression."""
    text, (start, end) = match.string, match.span()
    near = text[max(0, start - _NEAR) : start]
    return any(
        before.search(near) and number.match(match[0]) and after.match(text, end) for before, number, after in _WITHIN
    )


def _without_latex(text: str) -> str:
    if _BARE.fullmatch(text):
        return text
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    return text


def _last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…} of a text, or without one of the last \fbox{…}; "" if the box is a part of an
    expression; None without a box, or if it does not end."""
    mark = r"\boxed{" if r"\boxed{" in text else r"\fbox{"
    if (begin := text.rfind(mark)) < 0:
        return None
    before = text[max(0, begin - _NEAR) : begin]
    begin += len(mark)
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            within = _AROUND_BOX[0].search(before) or _AROUND_BOX[1].match(text, place + 1)
            return "" if within else text[begin:place]
    return None


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of a number; None for a division by zero, and for a number that is too large to be written out."""
    parts = [(match[name] or "1").replace(",", "").replace("−", "-") for name in ("whole", "top", "bottom")]
    for part in parts:
        digits, _, exponent = part.lower().partition("e")
        if len(digits) > _MOST_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > _MOST_DIGITS:
            return None
    whole, top, bottom = map(Fraction, parts)
    if not bottom:
        return None
    value = (top / bottom + (whole if match["whole"] else 0)) * _SCALES.get(match["scale"], 1)
    return -value if _MINUS.search(match["sign"]) else value
