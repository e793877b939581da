"""Rewards, advantages, and their use: curricula, buffers, measurements."""

import json
import math
import operator
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import FrozenInstanceError, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from penstock.graph import Advantages, Context, GraphError, NodeDef, Prompts, Rewards, Rollouts, Weights, load
from penstock.graph.protocols import Carried
from penstock.graph.types import NodeWarning, TokenAdvantages
from penstock.nodes import symbolic_math
from penstock.nodes.advantage import (
    batch_normalized,
    greedy_advantage,
    group_advantage,
    group_mean_advantages,
    grpo_advantages,
    leave_one_out_advantage,
    plain_advantage,
    rloo_advantages,
    uniform_groups,
    whiten,
)
from penstock.nodes.carried import carried
from penstock.nodes.curriculum import (
    MEMORY,
    Candidates,
    Varied,
    carries,
    choose,
    open_candidates,
    remember,
)
from penstock.nodes.data import open_prompts
from penstock.nodes.evaluate import measure
from penstock.nodes.learn.losses import aipo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.model import CausalLM
from penstock.nodes.open_model import open_model
from penstock.nodes.replay_buffer import ReplayBuffer, open_buffer, replay
from penstock.nodes.score import (
    ScoreError,
    accuracy,
    exact,
    length,
    math_answer,
    mixed,
    penalize_overlong,
    regex,
    score,
)
from penstock.runtime.tensor.codec import decode, encode
from tests.nodes.rollouts import random_rollouts
from tests.nodes.updating import batch, policy

# Exact rewards; a reward function that raises stops the group instead of giving zero.


def rollouts(texts: tuple[str, ...], answers: tuple[str, ...]) -> Rollouts:
    made = random_rollouts([(1, 2)] * len(texts))
    return replace(made, ordinals=(7,) * len(texts), prompts=("1+1=",) * len(texts), texts=texts, answers=answers)


# Ways to write twelve thousand and six hundred.
THOUSANDS = ("12 600", "12\u00a0600", "12\u202f600", "12'600", r"12\,600", r"12\ 600", "12~600", "12{,}600")
RIGHT = [
    (r"\boxed{AB}", "BA"),
    (r"\boxed{(-12)}", "-12"),
    (r"\boxed{(1,234)}", "(1,234)"),
    (r"\boxed{6:20}", "3:10"),
    (r"\boxed{7:30 \text{ a.m.}}", r"7\!:\!30 \text{ am}"),
    (r"\boxed{10 PM}", "10 p.m."),
    (r"\boxed{10 \text{ am}}", "10"),
    (r"\boxed{150}", "150 pm"),
    ("At last it is 3:30 P.M. on Monday", "3:30 pm"),
    (r"\boxed{\text{June } 3}", "June 3"),
    (r"\boxed{3rd of June}", "June 3, 2020"),
    ("It is 2024-01-05.", "2024-01-05"),
    (r"\boxed{01/02/2024}", "1/2/2024"),
    *(
        (right, "C")
        for right in ("The answer is C.", "Answer: **(C)**.", r"\boxed{\text{(C)}}", "It is $C$, so there.")
    ),
    (r"\boxed{C}", r"\text{(C)}"),
    (r"\boxed{1\pm\sqrt{19}}", r"1 \pm \sqrt{19}"),
    (r"\boxed{1+\sqrt{19}, 1-\sqrt{19}}", r"1 \pm \sqrt{19}"),
    (r"\boxed{\{-2,1\pm\sqrt{5}\}}", r"\{1\pm\sqrt{5},-2\}"),
    (r"\boxed{3,-3}", r"\pm 3"),
    (r"(a) We get $x=1,2$. So $\{1,2\}$", r"\{1,2\}"),
    (r"\boxed{(0,0),(1,1)}", r"\{(0,0),(1,1)\}"),
    (r"Therefore \fbox{42}. Check: 6*7", "42"),
    (r"\boxed{42} \fbox{QED}", "42"),
    ("933", "933"),
    ("0933", "933"),
    ("-7", "-7"),
    ("3.50", "3.5"),
    ("1,072", "1072"),
    ("it costs $1,072.00.", "1,072"),
    ("-$5", "$-5"),
    ("10 - 4 = 6", "6"),
    ("<<48/2=24>>24\n#### 72", "48/2\n#### 72"),
    ("#### 72 apples out of 90", "72"),
    ("#### 1\n#### 2", "2"),
    (".5", "0.50"),
    ("x = -3", "-3"),
    ("99999999999999999999999999999999999991", "99999999999999999999999999999999999991"),
    ("1/2", "1/2"),
    ("#### 1/2", "1/2"),
    ("#### 18/2", "9"),
    ("so 1 1/2 cups", "1.5"),
    ("1.5e3", "1,500"),
    ("1e400", "1e400"),
    ("#### −5", "-5"),
    (r"so it is \boxed{18}, not 20", "18"),
    (r"\boxed{x = \dfrac{9}{2}}", "4.5"),
    (r"\boxed{\frac12}", r"\frac{1}{2}"),
    (r"\boxed{-\frac{1}{2}}", "-0.5"),
    *((rf"\boxed{{{half}}}", "-1/2") for half in (r"\frac{1}{-2}", r"\frac{3}{-6}", "1/-2", "1/−2")),
    (r"It is $\frac{-3}{-6}$", "0.5"),
    (r"\boxed{10{,}080}", r"10,\!080"),
    (r"\boxed{\$32,\!348}", "32348"),
    (r"\boxed{5.4\text{ cents}}", "5.4"),
    (r"\boxed{30^{\circ}}", r"30^\circ"),
    (r"\boxed{12 \text{ cm}^2}", r"12"),
    (r"\boxed{50\%}", "50"),
    ("It is $\\frac{3}{4}$ of it.", "3/4"),
    (r"\(18\)", "18"),
    ("**18**", "18"),
    ("It is 12 cm², or 12 m³", "12"),
    (r"\boxed{x=y=12}", "12"),
    (r"\boxed{3 \text{ million}}", "3,000,000"),
    ("$1.5 million", "1500000"),
    ("3 dozen eggs", "36"),
    ("1200", "12 hundred"),
    (r"\boxed{+12}", "12"),
    ("It is –5", "-5"),
    (r"\boxed{52_8}", "52_8"),
    (r"\boxed{\frac{-1}{2}}", "-0.5"),
    (r"\boxed{\displaystyle \frac{3}{4}}", "0.75"),
    (r"\boxed{1.2 \times 10^{3}}", "1200"),
    (r"\boxed{12 \cdot 10^{-3} \text{ m}}", "0.012"),
    (r"\boxed{1200}", r"1.2 \times 10^3"),
    (r"\boxed{75}", r"\frac{3}{4} \times 10^2"),
    *((text.format(number), "12600") for text in ("It is {}.", r"\boxed{{{}}}") for number in THOUSANDS),
    ("1 234 567.5", "1,234,567.5"),
    *((f"It is 5 200 {rest}", "5200") for rest in ("apples.", "in total.", "dollars in all", "km of road", "is right")),
    ("She pays $12 600 per year", "12600"),
    ("1 234 567 people live there", "1234567"),
    ("100 1/2", "100.5"),
    (r"\boxed{2\sqrt{3}}", r"2\sqrt{3}"),
    *((word, word) for word in ("A", "yes", "12:30", "[1, 2]", r"2\sqrt{3}")),
    (r"\boxed{\sqrt{12}}", r"2\sqrt{3}"),
    *((f"So: #### {said}", r"2\sqrt{3}") for said in (r"2\sqrt{3}", "x = 2\\sqrt{3}.\nDone.", r"It is $2\sqrt{3}$")),
    (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\boxed{(2,\infty)}", r"(2,\infty)"),
    (r"\boxed{\text{(C)}}", r"\text{(C)}"),
    *(
        (right, "12")
        for right in (
            *(
                "<answer>12</answer>",
                "<b>12</b>",
                "6*2=<<6*2=12>>12",
                "it is~12",
                "=> 12",
                "-> 12",
                "So:\n> 12",
                "**12**!",
            ),
            # "At least" may be all of an answer; a dash, a plus or a slash may be a mark, a sign or "per".
            *(
                "at most **12**",
                "12 - a good result",
                "12 - I hope so",
                "It is + 12",
                "12/h",
                "<br/>12",
                "12</s>",
                ">> 12",
            ),
            *(r"x \ge \boxed{12}", r"- \boxed{12}/h", "so\n> \\boxed{12}", r"\boxed{12} - a good result"),
            # One number in parentheses.
            *(
                r"\boxed{(12)}",
                r"\boxed{x = \left( 12 \right)}",
                r"\boxed{\text{(12 apples)}}",
                r"\boxed{(\frac{24}{2})}",
            ),
            *("#### (12)", "The answer is (12).", "The answer is $(12)$", "x=(12)", "(a)(12)", "3 dozen, or half (12)"),
            *(
                r"$\boxed{12}$!",
                r"**\boxed{12}** (3 kinds)",
                r"- \boxed{12}",
                r"Step 3: \boxed{12}",
                r"\boxed{12}^\circ",
            ),
            *(r"\sqrt{144} = \boxed{12}", r"\therefore \boxed{12}", r"\mathbf{\boxed{12}}", r"\text{So }\boxed{12}"),
            *(r"\boxed{12\text{ m}^2}", r"\boxed{12\ \mathrm{m}^{3}}", "It is 12 m^2", r"\boxed{12\text{ m/s}^2}"),
            *(r"\boxed{12^\circ\text{C}}", r"\boxed{12^{\circ} F}", r"\boxed{12 \text{ J}}", r"\boxed{{12}}"),
            *("(a) +12", "*Step 2* 12", "3 ways\n* 12", "2) 12", "**In dollars (2)** 12", "at least 12", "C) + 12"),
            *("$3!+3!=12$", r"\boxed{3!+3!=12}", "4!/2=12", "(n-1)!=12", "left over 12", "3 times\n\n12", "3 over\n12"),
            *(r"\boxed{12 \quad}", r"\boxed{12 \text{ m}²}", r"\boxed{12}\text{ m}^2"),
            *(r"\boxed{12} \text{ cm}^2", r"\boxed{12}\%", r"\frac{24}{2} = \boxed{12}", r"\boxed{12~\text{cm}}"),
        )
    ),
    (r"- \frac{1}{2}", "-1/2"),
    ("-€5", "-5"),
    ("The change is −£1,200.50.", "-1200.5"),
    ("€-5", "-5"),
    ("½", "1/2"),
    ("3½", "3.5"),
    ("-3½", "-3.5"),
    ("Rs.500", "500"),
    ("He has 3 and 4, so 7", "7"),
    (r"\boxed{3} and then \boxed{4}", "4"),
    ("We round 4.67 to 5", "5"),
    (r"so $-\frac{3}{4}$", "-3/4"),
    (r"Answer - \frac34", "3/4"),
    ("A list:\n- \\frac{3}{4}", "3/4"),
    *(
        (right, "5")
        for right in (
            "USD 5",
            "A$5",
            "cost is Rs 5",
            "#### 5 apples",
            "#### 5.",
            "#### 5 - great job!",
            "#### **5**",
            "#### $5$",
            "#### 5\n\n3 + 4",
            "#### 5 and done",
            "It is 5...",
            "After 2 hours, 5 apples are left",
            "5 dollars and nothing else",
            "(5)",
            "Step 3: 5",
            "The total – **5**",
            "- **5** apples",
            "| total | 5 |",
            *("#### 30/6=5 mph", "#### So each paid $10/2 = $5.", "#### 5 = 3 + 2", "#### 5 x 1 = 5", "#### 2 + 3 = 5"),
            *("#### 5\nof 3", "#### 5\nx 2", "#### 5 hours\n\n30 minutes of rest", "a dozen\n\n5", "12 of\n5"),
            *(r"$x = 1$ and $\boxed{5}$", "0.05 or 5%", "After 1 hour, 5 minutes remain.", "Quotient 14 remainder 5"),
            *("INR5", "page5", "answer(5)", "(B)(5)", "Step 3:05", "ratio 3:5"),
            "16:5",
            "10:05",
            "12:0005",
            "1:05:5",
            "5 cm2",
            *(
                "_5_",
                "__5__",
                r"\underline{5}",
                '{"answer": 5}',
            ),
            *(
                "It adds up to 5",
                "10/2 simplifies to 5",
                "300 minutes or 5 hours",
                "$2x = 10$, or $x = 5$",
                "4 + 1 or 5",
            ),
            *("5 hours equals 5 hours", "In 2 hours, 5 minutes pass", "1 hour (5 laps)", "5\t5", "3 5"),
            # An expression or a change, and its value.
            *("20% of $25, or $5", "half of 10, or 5", "5 times 1, or 5", "10 over 2, or 5", r"\sqrt{25} or 5"),
            *("rises from 4 to 5", "rounding 52 to 5", "We add 3 to 5"),
            *("5\nor so", "4 apples to 5 friends", "4.67 or 5", "#### 5 pounds or 80 ounces", "(3 - 1) + 3 = 5"),
        )
    ),
    *(
        (minus, "-12")
        for minus in (
            *("x = - 12", "= - 12", r"\boxed{- 12}", "#### - 12", "|Profit|-12|", "3\n-12", "-$12", "x = **- 12**"),
            *(r"\[ - 12 \]", "`- 12`", "[- 12]", "x → - 12", "x equals - 12", "It is - 12 degrees", "It is - $12"),
            *(r"\boxed{ - 12 \text{ degrees}}", "- 12 dollars", "<b>- 12</b>", "5 - 17 gives - 12", "Answer: **- 12**"),
        )
    ),
    ("It is -½", "-1/2"),
    *((said, "5-10") for said in ("5-10", r"\boxed{5-10}", r"\boxed{$5 – 10$}", "#### 5 - 10.", "It is 5--10.")),
    *((r"\boxed{\$5-\$10}", said) for said in ("$5-$10$", "5 - 10", "5-10%")),
    ("1/3 or 33.3%", "33.3"),
]
WRONG = [
    ("934", "933"),
    ("", "933"),
    ("no number", "0"),
    ("7", "-7"),
    ("9 33", "933"),
    *((text.format(number), "600") for text in ("It is {}.", r"\boxed{{{}}}") for number in THOUSANDS),
    (r"\boxed{5 \quad 600}", "5600"),
    # Texts with two readings.
    *(
        (text, answer)
        for text in (
            "I have 5 200 dollar notes",
            "5 200-dollar notes",
            "5 200g packs",
            "5 200% gains",
            "#### 5 200 ml jars",
        )
        for answer in ("5200", "200", "5", "1000")
    ),
    (r"\boxed{3 \cdot 4 \times 10^2}", "1200"),
    (r"\boxed{3 + 4 \times 10^2}", "400"),
    (r"\boxed{4 \times 10^2 x}", "400"),
    (r"\boxed{4 \times 10^{25}}", "400"),
    *((text, "0.0075") for text in (r"\boxed{3/4 \times 10^2}", r"\boxed{\frac{3}{4} \times 10^2}")),
    ("0.0075", r"\frac{3}{4} \times 10^2"),
    (r"\boxed{12m^25}", "12"),
    ("72 ####", "72"),
    ("3.5", "35"),
    ("--5", "-5"),
    ("18/2", "18"),
    ("18/2", "2"),
    ("#### 18/2", "18"),
    ("#### 1 1/2", "1"),
    ("1/2/2024", "2024"),
    ("400", "1e400"),
    ("1e400", "400"),
    ("1e999999999", "1"),
    ("1e" + "9" * 5000, "1"),
    ("9" * 5000, "9"),
    ("5/0", "5"),
    ("#### 1,2", "12"),
    ("1.2.3", "3"),
    ("#### −5", "5"),
    (r"\boxed{19}, not 18", "18"),
    (r"18 \boxed{}", "18"),
    (r"\boxed{18", "17"),
    (r"\boxed{9 \cdot 2}", "18"),
    (r"\boxed{17 + 1}", "1"),
    (r"\boxed{18\pi}", "18"),
    (r"\boxed{\sqrt{18}}", "18"),
    (r"\boxed{18x}", "18"),
    (r"\boxed{17, 18}", "18"),
    (r"\boxed{\frac{18}{5}}", "18"),
    (r"\boxed{-18}", "18"),
    (r"\boxed{0.3333333}", "1/3"),
    ("It is $\\sqrt{18}$", "18"),
    ("It is $2^{18}$", "18"),
    ("It is $18^2$", "18"),
    ("It is $18\\pi$", "18"),
    (r"It is \frac{17}{18}", "18"),
    (r"\boxed{52_9}", "52_8"),
    (r"\boxed{52}", "52_8"),
    (r"\boxed{2\sqrt{2}}", r"2\sqrt{3}"),
    (r"\boxed{3.464102}", r"2\sqrt{3}"),
    (r"#### 3\sqrt{2}", r"2\sqrt{3}"),
    (r"#### 2\sqrt{3} or 5", r"2\sqrt{3}"),
    (r"\boxed{51}", r"\sqrt{51}"),
    (r"\boxed{(3,\infty)}", r"(2,\infty)"),
    ("", r"2\sqrt{3}"),
    ("99999999999999999999999999999999999991", "99999999999999999999999999999999999992"),
    *(
        (f"It is {wrong}", "12")
        for wrong in ("0x12", "√12", "12i", "12²", "12½", "12π", "12k", "not 12", "more than 12")
    ),
    *((rf"\boxed{{{wrong}}}", "12") for wrong in ("0x12", "√12", "12k", "not 12", "x=5, y=12", r"x=5,\theta=12")),
    *(
        (text.format(wrong), "12")
        for text in ("It is {}", r"\boxed{{{}}}")
        for wrong in (
            *("12 million", "12 thousand", "12 dozen", "12 hundredths", "minus 12", "negative 12", "twice 12", "12x"),
            *("half of 12", "root of 12", "log 12", "log(12)", "±12", "12 squared", "12 factorial", "12 pi", "2**12"),
            *(
                "2 * 12",
                "2*12",
                "2 × 12",
                "3 + 12",
                "(1+2)+12",
                "$3+$12",
                "2·12",
                "24÷12",
                "2 times 12",
                "24 divided by 12",
            ),
            *("2 * -12", "x != 12", "1/12/-1"),
            *("about 12", "Approximately 12", "nearly $12", "~12", "≈ 12", "x > 12", "x<12", "≥ 12", "≠12", "12!"),
        )
    ),
    *(
        (wrong, "12")
        for wrong in (
            *(r"\boxed{12}^2", r"$\boxed{12}^{2}$", r"\boxed{12}²", r"\boxed{12}!", r"\boxed{12}/5", r"\boxed{12} + 1"),
            *(r"2\boxed{12}", r"2 \cdot \boxed{12}", r"3 - \boxed{12}", r"-\boxed{12}", r"$x = - \boxed{12}$"),
            *(
                r"\sqrt{\boxed{12}}",
                r"\sqrt[3]{\boxed{12}}",
                r"\frac{1}{\boxed{12}}",
                r"2^{\boxed{12}}",
                r"\log \boxed{12}",
            ),
            *(r"\boxed{12} \times 10^3", r"\boxed{12}\pi", r"\boxed{12}\sqrt{2}", r"\boxed{12}_3", r"not \boxed{12}"),
            *(r"\boxed{12} million", r"$\boxed{12}$ million", r"\boxed{12} squared"),
            *(r"\boxed{12}x + 3", r"\boxed{12}.5", r"\boxed{12}k", "12₃"),
        )
    ),
    (r"\boxed{2\sqrt{3}}^2", r"2\sqrt{3}"),
    (r"\boxed{3:30 am}", "3:30 pm"),
    (r"\boxed{7:30 \text{ a.m.}}", r"7\!:\!30 \text{ p.m.}"),
    (r"\boxed{10 pm}", "10 am"),
    ("It is at 1:30 pm", "3:30 pm"),
    (r"\boxed{June 3}", "May 3"),
    (r"\boxed{June 3, 2021}", "June 3, 2020"),
    (r"\boxed{2024-01-05}", "2023-01-04"),
    (r"\boxed{2018}", "2024-01-05"),
    (r"\boxed{1/2/2024}", "2/4/2024"),
    (r"\boxed{\{1,2\}}", "(1,2)"),
    (r"\boxed{(1,2)}", r"\left\{1,2\right\}"),
    (r"so $7 \pm 3$.", r"\pm 3"),
    *((wrong, "C") for wrong in ("The answer is not C.", "It cannot be C.", r"\boxed{D}", r"\boxed{C", "ABC", "")),
    *((wrong, "C") for wrong in ("The answer is A, B, C", "The answer is C or D", "The answer is C. The answer is D.")),
    (r"\fbox{41}, and not 42", "42"),
    # Signs and numbers of an expression, a range or a quantity of two units.
    *(
        (wrong, "5")
        for wrong in (
            "-€5",
            "The change is -€5.",
            "−£5",
            "-¥5",
            "-₹5",
            "-A$5",
            "-USD 5",
            "-Rs 5",
            "-Rs.5",
            "-(5)",
            "- (5)",
            "-**5**",
            "**-**5",
            "-`5`",
            "‒5",
            "—5",
            "-\u200b5",
            "-(-5) is -(-5)",
            "#### 5 + 0.1",
            "#### 5 x 3",
            "#### 5 x",
            "#### 5 i",
            "#### 5+",
            "#### 5 mod 7",
            "#### 5 choose 2",
            "#### 5 percent of 3",
            "#### f(5)",
            "f(5)",
            "2024-05-05",
            "#### 5 or 6",
            "#### 5, 6",
            "#### 5;6",
            "#### 5 to 6",
            "#### 5 hours 30 minutes",
            r"\boxed{5\text{ is incorrect}}",
            r"\boxed{5} is wrong",
        )
    ),
    *((wrong, "1/2") for wrong in (r"- \frac{1}{2}", r"-\left(\frac{1}{2}\right)")),
    ("-(1/2)", "1/2"),
    ("|-5|", "-5"),
    ("-(-5)", "-5"),
    ("#### |-5|", "-5"),
    ("#### -(-5)", "-5"),
    ("Options:\n- 5", "-5"),
    ("#### 3 - 4", "3"),
    ("#### 3-4", "3"),
    ("#### floor(5.5)", "5.5"),
    ("(1/2)(3)", "3"),
    ("#### 4 hundred 50", "400"),
    ("It is 4 hundred 50", "50"),
    ("4 thousand 50", "50"),
    ("2 and 3/4", "0.75"),
    ("#### 2 and 3/4", "2"),
    ("5 hours 30 minutes", "30"),
    ("5 feet 6 inches", "6"),
    ("$5 and 25 cents", "25"),
    ("It is 10:30", "30"),
    *((text, "10") for text in ("It is 5-10", "5 - 10", "$5-$10", "5 – 10", "5 or 10", "between $5 and $10")),
    ("48-24", "24"),
    ("It weighs 5 kg 10 g", "10"),
    ("#### 0.333...", "0.333"),
    ("It is 0.333…", "0.333"),
    ("It is 20% of 50", "50"),
    ("18 cm2", "2"),
    ("-3½", "3.5"),
    (r"\boxed{3} or \boxed{4}", "4"),
    # Ranges, choices and quantities of two units, after "####", too.
    *(
        (text.format(joined), answer)
        for joined in (
            *("5 to 10", "5-to-10", "5--10", "5 — 10", "5—10", "5~10", "5 ... 10", "5..10", "5 kg-10 kg", "5%-10%"),
            *("$5$-$10$", "5 apples-10 apples", "5 apples - 10 apples", "**5** - **10**", "**5** or **10**", "5 OR 10"),
            *("$5 or $10", "$5.00 or $10.00", "5, or 10", "5 apples or 10 apples", "5  or 10", r"$5 \text{ or } 10$"),
            *("x = 5 or x = 10", "x = 10 or x = 5", "5 or\n10"),
            *("5 liters 10 ml", "5 kilometers and 10 meters", "5kg10g", "5 kg, 10 g", "5 ft 10 in", "5'10\""),
            *("5h 10m", "5h10m", "5 hours, 10 minutes.", "5 gallons 10 quarts", "5 tons 10 kg", "$5 and 10 cents"),
        )
        for text in ("It is {}", "#### {}")
        for answer in ("5", "10", "-10")
    ),
    ("5.5 or 10.5", "10.5"),
    ("1,000 or 2,000", "2000"),
    *((text, "-12") for text in ("x = 12 or x = -12", "24 -12", "**x=12** or **x=-12**", "#### x = 12 or x = -12")),
    # A mark or a minus: in doubt neither.
    *(
        (f"{text} - 12", answer)
        for text in (
            *("**Answer**", "Answer", "4. Total", "Total:", "Cost", "x", "- 12\nso x", "2X", "(x+1)", "f(x)", "AB"),
            *("**Answer:**", "|x|", "n!", "x'", "It is 3x²", r"\text{revenue}", "10 apples", "Week 3", "(b)"),
        )
        for answer in ("12", "-12")
    ),
    *((text, "12") for text in ("Total: - 12", "- 12 apples", "x - 12", "4H - 12", "from Between five and 12")),
    *((text, "5") for text in ("#### 5:10", "#### 5 R 1", "#### 5 remainder 1", "#### 5 or more", "#### 5 halves")),
    *(
        (wrong, "12")
        for wrong in (
            *("12 and a half", "#### 12 and a half", r"\boxed{12 thirds}", "two thirds of 12", "3/4 of 12", "12-ish"),
            *(
                "It isn't 12",
                "It cannot be 12",
                "not equal to 12",
                "It is over 12",
                "under 12",
                "It takes up to 12",
                "12+",
            ),
            *("12 or more", r"\boxed{over 12}", r"\boxed{up to 12}", "between **5** and **12**", "between -5 and 12"),
        )
    ),
    # Sums and products with an unknown, and bounds by a sign.
    *(
        (text.format(wrong), "12")
        for text in ("{}", "It is {}.", "#### {}", "It is ${}$", r"\boxed{{{}}}")
        for wrong in (
            *(
                "x + 12",
                "x+12",
                "12 + C",
                "12+C",
                "2x + 12",
                r"\pi + 12",
                r"12 + \pi",
                "f(x) + 12",
                "cost + 12",
                "(x + 12)",
            ),
            *("12 - x", "x*12", "12*x", "12 * x", "x·12", "12·x", "x/12", "12/x", "50% + 12", "12(x + 1)", "12 × (x)"),
            *("< 12", "<12", "> 12", ">= 12", "x >= 12", "x <= 12", r"\lt 12", r"\ge 12", "≧ 12", "12 > x", "12 ≤ x"),
            *(
                "f(12)",
                "(12, 3)",
                "(3, 12)",
                "(1, 2, 12]",
                "2(12)",
                "x(12)",
                "(12)^2",
                "-(12)",
                "(12)!",
                "(12)x",
                "(12)(3)",
            ),
            *(
                "(12) + 1",
                "3 + (12)",
                "(12)/2",
                "2/(12)",
                "x^(12)",
                r"\pi(12)",
                r"(12)\pi",
                "(12) million",
                "(> 12)",
                "x-(12)",
            ),
        )
    ),
    *((text, "12") for text in ("x + **12**", "x > **12**", r"$x \ge$ 12", "more than **12**", "12 x", "#### over 12")),
    *(
        (text, "12")
        for text in (
            *(
                r"x + \boxed{12}",
                r"2x+\boxed{12}",
                r"x - \boxed{12}",
                r"\boxed{12} + C",
                r"$\boxed{12}$ - x",
                r"\boxed{12}/x",
            ),
            *(r"$x > \boxed{12}$", r"\boxed{(12)} + 1", r"2\boxed{(12)}"),
        )
    ),
    *((text, "1") for text in ("(12) - 1", "(12)-1")),
    *((r"\boxed{(1,234)}", answer) for answer in ("1234", "234")),
    *((text, "-12") for text in (r"\boxed{(12)}", "(12)")),
    *((wrong, "5-10") for wrong in (r"\boxed{-5}", "the answer is -5", "10", "5")),
]


@pytest.mark.parametrize(
    ("response", "answer", "reward"), [*((*pair, 1.0) for pair in RIGHT), *((*pair, 0.0) for pair in WRONG)]
)
def test_equal_numbers_are_right_however_they_are_written(response: str, answer: str, reward: float) -> None:
    assert math_answer("", response, answer) == reward


@pytest.mark.parametrize(
    "piece",
    [
        "=, a",
        "√",
        "^",
        "{",
        r"\frac{",
        r"\boxed{",
        "1,",
        "-",
        r"\text{",
        " ",
        "9 ",
        "(1/",
        "~",
        "<a",
        "9 <",
        r"\boxed{9} ",
        r"\boxed{9}^",
        r"\boxed{9}_",
        r"\boxed{9}$",
        *("5 to ", "5–", "5 a", "_", "_a", '{"', "- ", "5..", "between ", "1 ", "x - "),
        *("x + ", "x>", "< ", "(", "(3, ", "(9)", "\\ge ", "9 * ", "(x)", "* ", "9\n> "),
        *("-\n ", "½ ", "5 hours ", "#### 5 and ", "-(", "5 or ", "#### 5", "#### 5 hours", "= -"),
    ],
)
def test_no_response_takes_long_to_read(piece: str) -> None:
    """If the time grew with the square of the length, this would not end."""
    text = (piece * 100_000)[:100_000]
    assert math_answer("", text + " " * 100_000 + "x", "18") == 0.0


@pytest.mark.parametrize("answer", ["none", "3 or 4", "#### 72 of 90", "48-24", "1e999999999", "1/0", "1,2", "3x"])
def test_without_math_verify_a_reference_answer_is_a_number(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(symbolic_math, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needed a number, or the package .*pip install 'penstock\[math\]'"):
        math_answer("", answer, answer)


def test_an_answer_that_is_never_found_out_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic_math, "DEADLINE_S", 2.0)
    endless = r"9^{9^{9^{9^9}}} + x"
    with pytest.warns(NodeWarning, match="math-verify had no verdict in time"):
        assert math_answer("", rf"\boxed{{{endless}}}", "2x") == 0.0
    assert math_answer("", r"\boxed{x + x}", "2x") == 1.0  # by another process
    with pytest.raises(ValueError, match="given the reference answer '', needed a number, or another answer"):
        math_answer("", "2x", "")
    with pytest.raises(ValueError, match="needed a number, or another answer"):
        math_answer("", r"\boxed{}", r"\boxed{}")


def of_shared_data(name: str) -> list[dict[str, str]]:
    root = Path(__file__).resolve().parents[2]
    files = [folder / "shared" / "data" / name for folder in root.parents]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        pytest.skip(f"shared/data/{name} is not there")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("split", ["train", "test"])
def test_gold_solutions_of_gsm8k_are_right_and_another_number_is_not(split: str) -> None:
    for row in of_shared_data(f"gsm8k/{split}.jsonl"):
        final = row["answer"].rpartition("####")[2].strip()
        assert math_answer("", row["answer"], final) == 1.0, row
        assert math_answer("", row["answer"] + "1", final) == 0.0, row


@pytest.mark.slow
def test_gold_solutions_of_math_500_are_right_and_another_number_is_not() -> None:
    rows = of_shared_data("math500/test.jsonl")
    assert sum(math_answer("", row["solution"], row["answer"]) for row in rows) >= 0.99 * len(rows)
    random = Random(0)
    for row in rows:
        places = [index for index, letter in enumerate(row["answer"]) if letter.isdigit()]
        # The power of a unit, as in inches^2, is no part of the number.
        if not places or "inches" in row["answer"]:
            continue
        place = random.choice(places)
        digit = (int(row["answer"][place]) + 1 + random.randrange(9)) % 10
        wrong = f"{row['answer'][:place]}{digit}{row['answer'][place + 1 :]}"
        assert math_answer("", rf"\boxed{{{wrong}}}", row["answer"]) == 0.0, (wrong, row["answer"])


@pytest.mark.parametrize(
    ("rule", "response", "answer", "reward"),
    [
        (exact, " yes\n", "yes", 1.0),
        (exact, "yes.", "yes", 0.0),
        (partial(regex, pattern=r"Answer: (\w+)"), "Answer: a. No, Answer: b", "b", 1.0),
        (partial(regex, pattern=r"Answer: (\w+)"), "Answer: a. No, Answer: b", "a", 0.0),
        (partial(regex, pattern=r"^<think>"), "<think>", "", 1.0),
        (partial(regex, pattern=r"^<think>"), " <think>", "", 0.0),
        (partial(regex, pattern=r"(a)|b"), "b", "", 1.0),
        (partial(length, at_most=3), "abc", "", 1.0),
        (partial(length, at_most=3), "abcd", "", 0.0),
        (partial(length, at_least=2, at_most=3), "a", "", 0.0),
    ],
)
def test_rules_by_hand(rule: Any, response: str, answer: str, reward: float) -> None:
    assert rule("", response, answer) == reward


def test_score_rewards_every_row_in_order() -> None:
    rewards, metrics = score.fn(rollouts(("2", "3", "2"), ("2", "2", "2")))
    assert rewards.values_N.tolist() == [1.0, 0.0, 1.0]
    assert metrics.keys() == {"finished"}
    assert accuracy.fn(Rewards(torch.tensor([1.0, 0.0, 0.5, 1.0]))) == {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda length: 1.0 / (length - 3), r"on group 7, row 1 raised ZeroDivisionError.*'abc'"),
        (lambda length: sys.exit("no"), r"on group 7, row 0 raised SystemExit: no .*'ok'"),
        (lambda length: float("nan"), r"on group 7, row 0: given nan \(float\), needed a finite number"),
        (lambda length: float("inf"), r"on group 7, row 0: given inf \(float\), needed a finite number"),
        (lambda length: 10**400, r"on group 7, row 0: given 10+ \(int\), needed a finite number"),
        (lambda length: 1e39, r"on group 7, row 0: given 1e\+39 \(float\), needed"),  # infinite in float32
        (lambda length: None, r"on group 7, row 0: given None \(NoneType\), needed"),
        (lambda length: "1", r"on group 7, row 0: given '1' \(str\), needed"),
        (lambda length: [1.0], r"on group 7, row 0: given \[1.0\] \(list\), needed"),
        (lambda length: torch.ones(2), r"on group 7, row 0: given tensor.* \(Tensor\), needed"),
    ],
)
def test_a_rule_that_raises_names_the_group_and_the_row(value: Callable[[int], Any], said: str) -> None:
    with pytest.raises(ScoreError, match=said) as caught:
        score.fn(rollouts(("ok", "abc"), ("1", "1")), by=lambda prompt, response, answer: value(len(response)))
    assert isinstance(caught.value.__cause__, (ZeroDivisionError, SystemExit) if "raised" in said else ValueError)


# A group is worth learning from if its rewards differ; a response that is too long costs up to one.


@pytest.mark.parametrize(
    ("values", "differ"), [([1, 0, 1], True), ([1, 1, 1], False), ([0, 0, 0], False), ([0.3], False), ([], False)]
)
def test_a_group_is_mixed_if_its_rewards_differ(values: list[float], differ: bool) -> None:
    rollouts, _ = batch()
    assert mixed(rollouts, Rewards(torch.tensor(values))) is differ


@pytest.mark.parametrize(("max_length", "by_hand"), [(4, [0.5, 1, 0, 1, 0.5]), (3, [0, 1, 0, 0.5, 0])])
def test_a_penalty_falls_along_a_line_to_the_longest_length_and_is_one_at_most(
    max_length: int, by_hand: list[float]
) -> None:
    rollouts, ones = batch()[0], Rewards(torch.ones(5))
    assert rollouts.response_lengths_N.tolist() == [3, 1, 4, 2, 3]
    for given in ({"max_length": max_length}, {"context": Context(max_tokens=max_length)}):
        assert penalize_overlong.fn(ones, rollouts, buffer=2, **given).values_N.tolist() == by_hand


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"buffer": 0, "max_length": 4}, "buffer=0"),
        ({"buffer": 5, "max_length": 4}, "buffer=5"),
        ({"buffer": 2}, "given no max_length outside of a run"),
    ],
)
def test_a_buffer_outside_the_length_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        penalize_overlong.fn(Rewards(torch.ones(5)), batch()[0], **options)


# Each baseline by hand, and each node's advantages by its paper; groups of equal rewards give exactly nothing.


# group 0: 1, 2, 6 of mean 3, squares 14; group 1: 5, 7 of mean 6, squares 2
REWARDS = torch.tensor([1.0, 2.0, 6.0, 5.0, 7.0], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 1, 1])


def normalized(values: Tensor) -> Tensor:
    """Return REINFORCE++'s advantages. With a baseline, `values` are advantages already."""
    found: Tensor = batch_normalized.fn(Advantages(values)).values_N
    return found


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_rows_of_a_group_need_not_be_neighbours() -> None:
    order = torch.tensor([3, 0, 4, 2, 1])
    for advantages in (group_mean_advantages, grpo_advantages, rloo_advantages):
        torch.testing.assert_close(advantages(REWARDS[order], GROUPS[order]), advantages(REWARDS, GROUPS)[order])


def test_grpo_divides_by_the_population_or_the_sample_deviation() -> None:
    population, sample = math.sqrt(14 / 3), math.sqrt(14 / 2)
    by_hand = float64([-2 / population, -1 / population, 3 / population, -1, 1])
    torch.testing.assert_close(grpo_advantages(REWARDS, GROUPS), by_hand)
    by_hand = float64([-2 / sample, -1 / sample, 3 / sample, -1 / math.sqrt(2), 1 / math.sqrt(2)])
    torch.testing.assert_close(grpo_advantages(REWARDS, GROUPS, correction=1), by_hand)


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    torch.testing.assert_close(rloo_advantages(REWARDS, GROUPS), float64([1 - 4, 2 - 3.5, 6 - 1.5, 5 - 7, 7 - 5]))
    with pytest.raises(ValueError, match="1 samples in group 1"):
        rloo_advantages(torch.ones(3), torch.tensor([0, 1, 0]))


def test_reinforce_plus_plus_normalises_over_the_whole_batch() -> None:
    deviation = math.sqrt(((1 - 4.2) ** 2 + (2 - 4.2) ** 2 + (6 - 4.2) ** 2 + (5 - 4.2) ** 2 + (7 - 4.2) ** 2) / 5)
    torch.testing.assert_close(normalized(REWARDS), (REWARDS - 4.2) / deviation)


def test_reinforce_plus_plus_with_baseline_takes_the_group_mean_off_first() -> None:
    torch.testing.assert_close(group_mean_advantages(REWARDS, GROUPS), float64([-2, -1, 3, -1, 1]))
    by_hand = float64([-2, -1, 3, -1, 1]) / math.sqrt((14 + 2) / 5)
    torch.testing.assert_close(normalized(group_mean_advantages(REWARDS, GROUPS)), by_hand)


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1 / 3, 1e8, -3e-9])
@pytest.mark.parametrize("samples", [1, 3, 7])
def test_equal_rewards_give_exactly_zero(reward: float, samples: int) -> None:
    rewards = torch.cat([torch.full((samples,), reward), torch.tensor([0.0, 1.0])])
    groups = torch.cat([torch.zeros(samples, dtype=torch.long), torch.tensor([1, 1])])
    for advantages in (
        group_mean_advantages(rewards, groups),
        grpo_advantages(rewards, groups),
        grpo_advantages(rewards, groups, correction=1),
        normalized(group_mean_advantages(rewards, groups)),
    ):
        assert advantages.isfinite().all()
        assert advantages[-2] < 0 < advantages[-1]
    assert (grpo_advantages(rewards, groups)[:samples] == 0).all()
    assert (group_mean_advantages(rewards, groups)[:samples] == 0).all()
    assert (normalized(rewards[:samples]) == 0).all()


def test_groups_all_right_or_all_wrong_are_uniform() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.5, 0.0])
    groups = torch.tensor([0, 1, 0, 1, 2, 2, 3])
    assert uniform_groups(rewards, groups).tolist() == [True, True, False, True]
    assert uniform_groups(torch.full((3,), 0.7), torch.zeros(3, dtype=torch.long)).tolist() == [True]


def test_whitening_sees_only_what_the_mask_holds() -> None:
    values = float64([1, 1000, 2, 6, -1000])
    mask = torch.tensor([True, False, True, True, False])
    deviation = math.sqrt(14 / 3)
    white = whiten(values, mask)
    torch.testing.assert_close(white, float64([-2 / deviation, 0, -1 / deviation, 3 / deviation, 0]))
    torch.testing.assert_close(white[mask].square().mean().item(), 1.0)


MARKS = Rewards(torch.tensor([1.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize(
    ("made", "by_hand"),
    [
        (group_advantage.fn(MARKS), [0.5, -0.5, -0.5, 0.5]),
        (group_advantage.fn(MARKS, normalize=True), [1.0, -1.0, -1.0, 1.0]),
        (group_advantage.fn(Rewards(torch.full((3,), 0.7))), [0, 0, 0]),
        (group_advantage.fn(Rewards(torch.full((3,), 0.7)), normalize=True), [0, 0, 0]),
        (leave_one_out_advantage.fn(Rewards(torch.tensor([3.0, 0.0, 1.5]))), [3 - 0.75, 0 - 2.25, 1.5 - 1.5]),
        (plain_advantage.fn(MARKS), [1, 0, 0, 1]),
        (plain_advantage.fn(MARKS, baseline=0.5), [0.5, -0.5, -0.5, 0.5]),
        # The greedy response is the baseline of its prompt; a batch is normalised as a whole.
        (greedy_advantage.fn(MARKS, Rewards(torch.tensor([1.0]))), [0, -1, -1, 0]),
        (batch_normalized.fn(Advantages(torch.tensor([3.0, 1.0, 1.0, -1.0]))), [2**0.5, 0.0, 0.0, -(2**0.5)]),
        (batch_normalized.fn(Advantages(torch.full((4,), 0.3))), [0, 0, 0, 0]),
    ],
)
def test_each_nodes_advantages_by_hand(made: Advantages, by_hand: list[float]) -> None:
    torch.testing.assert_close(made.values_N, torch.tensor(by_hand, dtype=torch.float32))


def test_a_batch_is_normalised_over_the_tokens_that_a_policy_sampled() -> None:
    rollouts = random_rollouts(unsampled=[(1, 0), (2, 1), (2, 2)])
    sampled_NT = (torch.arange(4) < rollouts.response_lengths_N[:, None]) & (rollouts.versions_NT >= 0)
    values_NT = torch.arange(20.0).view(5, 4) * sampled_NT
    made = batch_normalized.fn(TokenAdvantages(values_NT), rollouts)
    assert isinstance(made, TokenAdvantages)
    own_P = values_NT[sampled_NT]
    torch.testing.assert_close(made.values_N[sampled_NT], (own_P - own_P.mean()) / own_P.std(correction=0))
    assert not made.values_N[~sampled_NT].any()
    with pytest.raises(ValueError, match="given advantages of tokens, needed their rollouts"):
        batch_normalized.fn(TokenAdvantages(values_NT))


def test_baselines_are_of_one_response_and_of_whole_batches() -> None:
    assert batch_normalized.clock == "update"
    with pytest.raises(ValueError, match="given 4 greedy responses to a prompt, needed one"):
        greedy_advantage.fn(MARKS, MARKS)


@pytest.mark.parametrize("make", [group_advantage, leave_one_out_advantage])
def test_one_sample_has_nobody_to_be_compared_with(make: NodeDef[..., Any]) -> None:
    with pytest.raises(ValueError, match=rf"{make.__name__}: given 1 sample for a prompt, needed 2 or more"):
        make.fn(Rewards(torch.tensor([1.0])))


def kinds(rollouts: Rollouts) -> tuple[str, ...]:
    return rollouts.texts


def two_names(rollouts: Rollouts) -> list[int]:
    return [0, 1]


KINDS = replace(random_rollouts(), ordinals=(0,) * 5, texts=("a", "b", "a", "b", "a"))
MIXED = Rewards(torch.tensor([1.0, 5.0, 0.0, 7.0, 2.0]))


def test_rows_are_compared_within_their_sub_group() -> None:
    assert group_advantage(MIXED, KINDS, by=kinds).values_N.tolist() == [0, -1, -1, 1, 1]
    assert leave_one_out_advantage(MIXED, KINDS, by=kinds).values_N.tolist() == [0, -2, -1.5, 2, 1.5]
    normal = group_advantage(MIXED, KINDS, by=kinds, normalize=True).values_N
    torch.testing.assert_close(normal, torch.tensor([0, -1, -(1.5**0.5), 1, 1.5**0.5]))
    assert group_advantage(MIXED, KINDS).values_N.tolist() == group_advantage(MIXED).values_N.tolist()


@pytest.mark.parametrize("normalize", [False, True])
def test_rewards_that_differ_by_rounding_are_equal(normalize: bool) -> None:
    """0.1 · 3 + 0.2 · 2 and 0.7 · 1: divided by the deviation, the last bit would be as large as any advantage."""
    sums = 0.1 * torch.tensor([3.0, 3, 0, 0]) + 0.2 * torch.tensor([2.0, 2, 0, 0]) + 0.7 * torch.tensor([0.0, 0, 1, 1])
    assert len({*sums.tolist()}) == 2
    assert not group_advantage(Rewards(sums), normalize=normalize).values_N.any()
    assert not mixed(random_rollouts([(1, 2)] * 4), Rewards(sums))
    # A small difference that is one is kept, about its exact mean.
    few = torch.tensor([0.7, 0.7, 0.7, 0.70001])
    apart = group_advantage(Rewards(few), normalize=True).values_N
    torch.testing.assert_close(apart, torch.tensor([-1.0, -1, -1, 3]) / 3**0.5, rtol=1e-5, atol=1e-5)
    assert mixed(random_rollouts([(1, 2)] * 4), Rewards(few))
    # The squares of these are no float32; infinity is no rounding.
    tiny = group_advantage(Rewards(torch.tensor([1e-23, 2e-23])), normalize=True).values_N
    torch.testing.assert_close(tiny, torch.tensor([-1.0, 1.0]))
    assert uniform_groups(torch.tensor([math.inf, 0.0]), torch.tensor([0, 0])).tolist() == [False]


@pytest.mark.parametrize(
    "rollouts",
    [
        replace(KINDS, ordinals=(3, 9, 3, 9, 3)),
        replace(KINDS, prompts=("a", "b", "a", "b", "a")),  # two prompts of one group
    ],
)
def test_rows_are_compared_within_their_prompt_also_in_a_whole_batch(rollouts: Rollouts) -> None:
    assert group_advantage(MIXED, rollouts).values_N.tolist() == [0, -1, -1, 1, 1]
    assert leave_one_out_advantage(MIXED, rollouts).values_N.tolist() == [0, -2, -1.5, 2, 1.5]
    assert group_advantage(MIXED, rollouts, by=lambda r: [0, 0, 1, 0, 1]).values_N.tolist() == [0, -1, -1, 1, 1]


def lettered(rollouts: Rollouts) -> Tensor:
    return torch.tensor([text == "a" for text in rollouts.texts])


def test_the_elements_of_a_tensor_name_sub_groups_by_their_values() -> None:
    assert group_advantage(MIXED, KINDS, by=lettered).values_N.tolist() == [0, -1, -1, 1, 1]


def test_a_row_alone_in_its_sub_group_has_no_advantage() -> None:
    alone = replace(KINDS, texts=("a", "b", "a", "c", "a"))
    assert group_advantage(MIXED, alone, by=kinds).values_N.tolist() == [0, 0, -1, 0, 1]
    with pytest.raises(ValueError, match="given 1 samples in group 1, needed 2 or more"):
        leave_one_out_advantage(MIXED, alone, by=kinds)


def test_sub_groups_without_rollouts_or_with_too_few_names_are_refused() -> None:
    with pytest.raises(ValueError, match="needed the input `rollouts`"):
        group_advantage(MIXED, by=kinds)
    with pytest.raises(ValueError, match="by=two_names: given 2 names of sub-groups, needed 5, one for each row"):
        group_advantage(MIXED, KINDS, by=two_names)


# The curriculum takes the candidate of the kind whose rewards have varied most so far.


CANDIDATES = Candidates((7, 7, 7), ("111+222=", "199+1=", "508-99="), ("333", "200", "409"))


def seen(**variances: float) -> Varied:
    return Varied(variances)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("123+456=", "+0"),
        ("199+101=", "+2"),
        ("999+999=", "+3"),
        ("500-499=", "-2"),
        ("987-123=", "-0"),
        ("7+12=", "+0"),
        ("7+93=", "+2"),
    ],
)
def test_a_problem_is_known_by_its_sign_and_carries(text: str, kind: str) -> None:
    assert carries(text) == kind
    with pytest.raises(ValueError, match="given 'How many apples', needed a problem such as"):
        carries("How many apples")


def by_first(text: str) -> str:
    return text[0]


def test_the_most_varied_kind_is_chosen_and_what_was_never_seen_comes_first() -> None:
    def chosen(varied: Varied) -> str:
        prompts, _ = choose.fn(CANDIDATES, varied, by=by_first)
        assert prompts.ordinals == (7,)
        assert prompts.answers[0] == dict(zip(CANDIDATES.texts, CANDIDATES.answers, strict=True))[prompts.texts[0]]
        text: str = prompts.texts[0]
        return text

    assert chosen(seen(**{"1": 0.1, "5": 0.2})) == "508-99="
    assert chosen(seen(**{"1": 0.2, "5": 0.1})) == "111+222="
    assert chosen(seen(**{"1": 0.2})) == "508-99="
    assert choose.fn(CANDIDATES, seen(**{"1": 0.2}), by=by_first)[1] == {"unseen": 1.0}


def test_what_is_remembered_is_the_variance_within_each_group() -> None:
    prompts = Prompts((0, 1, 2), ("1", "5", "1"), ("", "", ""))
    rewards = Rewards(torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]))
    varied, figures = remember.fn(seen(), prompts, rewards, by=by_first)
    assert varied.variances == pytest.approx({"1": MEMORY * 0.25, "5": 0.0})
    assert figures == {"kinds": 2.0}
    with pytest.raises(ValueError, match="given 5 rewards of 3 groups"):
        remember.fn(seen(), prompts, Rewards(torch.ones(5)), by=by_first)


def test_each_group_has_candidates_of_its_own_that_depend_on_its_ordinal_alone() -> None:
    source = open_candidates(Context(node="c", seed=3, data="arithmetic", options={"candidates": 3}))
    first, second = source.read(0), source.read(1)
    assert len(set(first.texts + second.texts)) == 6
    assert source.read(1) == second
    with pytest.raises(ValueError, match="given 0, needed at least 1"):
        open_candidates(Context(data="arithmetic", options={"candidates": 0}))


# A buffer of past groups: what is drawn and forgotten, what a learner is given, and its checkpoints.


CONTEXT = Context(node="replay", seed=3)
BATCH, SAMPLES = 3, 2


def memory(seed: int = 3) -> ReplayBuffer:
    return open_buffer(replace(CONTEXT, seed=seed))


def replay_batch(update: int) -> tuple[Rollouts, Advantages]:
    """Return `BATCH` prompt groups of `SAMPLES`, with the update as version; later updates have longer responses."""
    rows = BATCH * SAMPLES
    rollouts = random_rollouts([(2, 1 + (update + row) % 3 + update) for row in range(rows)], seed=update)
    ordinals = tuple(update * BATCH + row // SAMPLES for row in range(rows))
    versions = torch.full_like(rollouts.versions_NT, update)
    return replace(rollouts, ordinals=ordinals, versions_NT=versions), Advantages(torch.arange(rows) + 10.0 * update)


def play(
    state: ReplayBuffer, updates: range, **options: Any
) -> tuple[ReplayBuffer, list[tuple[Rollouts, Advantages]], list[Any]]:
    made, figures = [], []
    for update in updates:
        state, out, figure = replay.fn(state, *replay_batch(update), **options)
        made.append(out)
        figures.append(figure)
    return state, made, figures


def groups(rollouts: Rollouts) -> list[int]:
    return list(dict.fromkeys(rollouts.ordinals))


def test_the_first_batch_is_learnt_from_as_it_is() -> None:
    _, ((rollouts, advantage),), (figures,) = play(memory(), range(1))
    fresh, worth = replay_batch(0)
    assert torch.equal(rollouts.tokens_NS, fresh.tokens_NS)
    assert rollouts.ordinals == fresh.ordinals
    assert rollouts.replayed_N.tolist() == [False] * len(fresh)
    assert torch.equal(advantage.values_N, worth.values_N)
    assert figures == {"replayed": 0.0, "replayed_age": 0.0, "buffered": 3.0}


def test_past_groups_come_whole_after_the_fresh_ones_with_all_that_belongs_to_them() -> None:
    _, made, figures = play(memory(), range(4), take=2)
    rollouts, advantage = made[3]
    assert groups(rollouts)[:BATCH] == [9, 10, 11]
    old = groups(rollouts)[BATCH:]
    assert len(old) == 2
    assert set(old) < set(range(9))
    assert rollouts.replayed_N.tolist() == [False] * BATCH * SAMPLES + [True] * 2 * SAMPLES
    assert figures[3]["replayed"] == 2.0
    assert figures[3]["replayed_age"] == pytest.approx(sum(3 - ordinal // BATCH for ordinal in old) / 2)
    for row in range(BATCH * SAMPLES, len(rollouts)):
        update, place = divmod(rollouts.ordinals[row], BATCH)
        fresh, worth = replay_batch(update)
        there = place * SAMPLES + row % SAMPLES
        length, width = int(fresh.response_lengths_N[there]), fresh.tokens_NS.shape[1]
        assert torch.equal(rollouts.tokens_NS[row, :width], fresh.tokens_NS[there])
        assert torch.equal(rollouts.logprobs_NT[row, :length], fresh.logprobs_NT[there, :length])
        assert rollouts.versions_NT[row, 0] == update
        assert advantage.values_N[row] == worth.values_N[there]


@pytest.mark.parametrize("max_age", [1, 2, 3])
def test_no_group_is_older_than_its_bound(max_age: int) -> None:
    _, made, figures = play(memory(), range(8), take=100, max_age=max_age)
    for update, (rollouts, _) in enumerate(made):
        first = max(0, update - max_age) * BATCH
        assert sorted(groups(rollouts)) == list(range(first, (update + 1) * BATCH))
    assert figures[-1] == {"replayed": 3.0 * max_age, "replayed_age": (max_age + 1) / 2, "buffered": 3.0 * max_age}


def test_a_full_buffer_forgets_the_oldest_groups() -> None:
    state, made, _ = play(memory(), range(5), take=100, capacity=4, max_age=100)
    assert groups(state.past()) == [11, 12, 13, 14]
    assert sorted(groups(made[-1][0])) == [8, 9, 10, 11, 12, 13, 14]


def test_each_update_draws_anew() -> None:
    """Draws follow from the seed. From an unchanged buffer all groups come sooner or later: draws do not repeat."""

    def seeded(seed: int) -> list[list[int]]:
        return [groups(rollouts) for rollouts, _ in play(memory(seed), range(6), take=2)[1]]

    assert seeded(3) == seeded(3) != seeded(4)
    state, _, _ = play(memory(), range(1), max_age=100)
    drawn = []
    for update in range(20):
        state = replace(state, update=1 + update)
        _, (rollouts, _), _ = replay.fn(state, *replay_batch(30), take=1, max_age=100)
        drawn += groups(rollouts)[BATCH:]
    assert set(drawn) == set(range(BATCH))


@pytest.mark.parametrize("before", [0, 3])
def test_a_buffer_goes_on_from_a_checkpoint_to_the_bit(before: int) -> None:
    whole = play(memory(), range(before), take=2)[0]
    resumed = decode(ReplayBuffer, *encode(whole))
    assert type(resumed) is ReplayBuffer
    ours, theirs = (play(state, range(before, before + 3), take=2)[1] for state in (whole, resumed))
    for made, others in zip(ours, theirs, strict=True):
        for one, other in zip(made, others, strict=True):
            for name, column in vars(one).items():
                same = torch.equal if isinstance(column, Tensor) else operator.eq
                assert same(column, getattr(other, name))


def test_an_update_counts_replayed_groups_apart_and_cuts_all_of_them_into_minibatches() -> None:
    """Three fresh groups of lag 0, and two past ones whose lags are their ages: minibatches of three and of two."""
    learner, state = policy(), memory()
    for update in range(3):
        state, (rollouts, advantage), figures = replay.fn(state, *replay_batch(update), take=2)
        _, found = policy_update.fn(learner, rollouts, advantage, loss=aipo, minibatches=2, lr=0.0)
        old = [ordinal for ordinal in groups(rollouts) if ordinal < update * BATCH]
        fresh = replay_batch(update)[0].response_lengths_N.sum()
        assert len(old) == figures["replayed"] == (2 if update else 0)
        assert (found["lag_mean"], found["lag_max"]) == (0, 0)
        assert found["replayed_lag_max"] == max((update - ordinal // BATCH for ordinal in old), default=0)
        assert found["replayed_tokens"] == found["tokens"] - fresh
        assert (found["replayed_tokens"] > 0) == (update > 0)


def test_advantages_of_tokens_stay_of_tokens() -> None:
    state = memory()
    for update in range(2):
        rollouts, _ = replay_batch(update)
        state, (mixed, advantage), _ = replay.fn(state, rollouts, TokenAdvantages(rollouts.logprobs_NT * 2))
    assert isinstance(advantage, TokenAdvantages)
    assert len(mixed) == 4 * BATCH
    assert torch.equal(advantage.values_N, mixed.logprobs_NT * 2)


# A measurement is the greedy accuracy of one version on the held-out problems.


MEASURE_CONTEXT = Context(node="measure", seed=1, data="arithmetic", max_tokens=8, slots=16)


def weights(version: int) -> Weights:
    model, _ = open_model(CausalLM, MEASURE_CONTEXT)
    return Weights(version, {name: p.detach() for name, p in model.named_parameters()})


def ends_in_an_even_digit(prompt: str, response: str, answer: str) -> float:
    return float(answer[-1] in "02468")


@pytest.mark.parametrize("segment", [0, 3])
def test_all_problems_are_held_out_and_count_once_and_the_version_is_told(segment: int) -> None:
    assert measure.init is not None
    context = replace(MEASURE_CONTEXT, segment=segment)
    examiner = measure.init(context, problems=24, by=ends_in_an_even_digit)
    held_out, train = (open_prompts(replace(MEASURE_CONTEXT, split=split)) for split in ("evaluate", "train"))
    assert examiner.source.read(0) == held_out.read(0) != train.read(0)
    answers = [held_out.read(ordinal).answers[0] for ordinal in range(24)]
    examiner, figures = measure.fn(examiner, weights(5), problems=24, by=ends_in_an_even_digit)
    expected = sum(answer[-1] in "02468" for answer in answers) / 24
    assert figures == {"accuracy": pytest.approx(expected), "accuracy_version": 5.0}
    assert 0 < expected < 1
    assert not examiner.busy()


def half_or_whole(prompt: str, response: str, answer: str) -> float:
    return 1.0 if answer[-1] in "02468" else 0.5


def test_a_part_of_a_reward_is_no_right_answer() -> None:
    figures = []
    for by in (half_or_whole, ends_in_an_even_digit):
        assert measure.init is not None
        examiner = measure.init(MEASURE_CONTEXT, problems=8, by=by)
        figures.append(measure.fn(examiner, weights(5), problems=8, by=by)[1])
    assert figures[0] == figures[1]


def test_two_measurements_at_once_do_not_mix() -> None:
    assert measure.init is not None
    examiner = measure.init(MEASURE_CONTEXT, problems=3, by=math_answer)
    live = weights(2)
    for tag in ("a", "b"):
        examiner.submit(tag, {"behaviour": live})
    found = {}
    while examiner.busy():
        found.update(examiner.step())
    assert found["a"] == found["b"]
    examiner.submit("c", {"behaviour": live})
    examiner.reset()
    assert not examiner.busy()


# `@carried`: the values that it takes, which a checkpoint's JSON gives back as they were.


@carried
class Plain:
    rate: float = 0
    count: int = 0
    name: str = "a"
    on: bool = True
    nothing: None = None
    parts: list[Any] = field(default_factory=list)
    pair: tuple[Any, ...] = ()
    table: dict[str, Any] = field(default_factory=dict)


@carried
@dataclass(frozen=True)
class Frozen:
    table: ClassVar[object] = print  # a class attribute is no field
    mean: float = 0.5


@carried
class Started:
    """Its first value depends on the run."""

    start: float

    @classmethod
    def make(cls, context: Context) -> "Started":
        return cls(context.options["start"])


@pytest.mark.parametrize(
    "value",
    [
        Plain(),
        Plain(0.1, 2**70, "ä\n", False, None, [1, [2.5, None], (3,)], ((), (1, [2])), {"a": {"b": (1,)}, "": []}),
        Plain(float("inf"), -1),
    ],
)
def test_a_value_comes_back_from_a_checkpoint_as_it_was(value: Any) -> None:
    tensors, facts = value.state()
    again = Plain(rate=9.0, name="other")
    again.restore(tensors, json.loads(json.dumps(facts)))  # type: ignore[attr-defined]
    assert again == value == deepcopy(value)
    assert [type(x) for x in vars(again).values()] == [type(x) for x in vars(value).values()]
    assert isinstance(value, Carried)


def test_the_first_value_is_made_of_the_defaults_or_by_the_class() -> None:
    assert load(Plain.maker)(Context()) == Plain()  # type: ignore[attr-defined]
    assert load(Started.maker)(Context(options={"start": 3.0})) == Started(3.0)  # type: ignore[attr-defined]


def test_numbers_are_sent_with_dtypes_that_stay() -> None:
    sent: dict[str, torch.Tensor] = Plain().weights()  # type: ignore[attr-defined]
    later: dict[str, torch.Tensor] = Plain(0.5, 3).weights()  # type: ignore[attr-defined]
    assert {name: t.dtype for name, t in sent.items()} == {name: t.dtype for name, t in later.items()}
    assert {name: t.item() for name, t in later.items()} == {"rate": 0.5, "count": 3, "on": True}


def test_a_frozen_dataclass_stays_frozen_and_is_restored_all_the_same() -> None:
    value: Any = Frozen(0.25)
    with pytest.raises(FrozenInstanceError):
        value.mean = 1.0
    assert value.state() == ({}, {"mean": 0.25})
    value.restore({}, {"mean": 2.0})
    assert value == Frozen(2.0)
    with pytest.raises(ValueError, match="given a checkpoint with the fields avg, needed mean"):
        value.restore({}, {"avg": 2.0})
    with pytest.raises(TypeError, match=r"Frozen\.mean: given a torch\.Tensor"):
        Frozen(torch.tensor(1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [torch.tensor(1.0), {1: 2}, {"a tuple": 1}, {1, 2}, b"x", [object()], 1j])
def test_what_is_not_plain_is_refused_with_the_field(bad: Any) -> None:
    value = Plain()
    with pytest.raises(TypeError, match=r"test_rewards.py:\d+: Plain.table: given a .*, needed a number, a text"):
        value.table = bad
    assert value.table == {}
    value.parts.append(bad)
    with pytest.raises(TypeError, match=r"Plain\.parts: given a"):
        value.state()  # type: ignore[attr-defined]


def test_a_whole_number_that_no_tensor_holds_is_kept_but_not_sent() -> None:
    value: Any = Plain(rate=float("-inf"), count=2**70)
    assert value.state()[1]["count"] == 2**70
    with pytest.raises(ValueError, match=r"Plain\.count: given 1180591620717411303424, needed a whole number"):
        value.weights()
    value.count = -(2**63)
    assert (value.weights()["count"].item(), value.weights()["rate"].item()) == (-(2**63), float("-inf"))


def test_a_class_that_cannot_be_made_elsewhere_is_refused_at_its_line() -> None:
    with pytest.raises(GraphError, match="a class inside a function") as error:

        @carried
        class Inner:
            mean: float = 0.0

    assert error.value.faults[0].where.startswith(f"{__file__}:")
    needy = type("Needy", (), {"__annotations__": {"mean": float}, "__module__": __name__})
    with pytest.raises(GraphError, match=r"field 'mean' \[field-without-default\]\n"):
        carried(needy)
