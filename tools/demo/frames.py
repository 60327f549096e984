"""Frames of questions: for each kind of fact, those for training and those held out.

`{x}` is a name of the fact, `{noun}` the noun of its section, and `{a|b}` means a or b. A held-out
frame never occurs in training, with any name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frames:
    train: tuple[str, ...]
    held_out: tuple[str, ...]


def _frames(train: str, held_out: str) -> Frames:
    return Frames(
        *(tuple(line.strip() for line in text.strip().splitlines()) for text in (train, held_out))
    )


FRAMES: dict[str, Frames] = {
    "concept": _frames(
        """
        what is {x}?
        what's {x}?
        what is {x}?
        explain {x}
        can you explain {x}?
        please explain {x} to me
        tell me about {x}
        tell me something about {x}
        what does {x} mean?
        what is meant by {x}?
        define {x}
        describe {x}
        {x}?
        {x}
        what do you know about {x}?
        do you know {x}?
        do you know what {x} is?
        could you tell me what {x} is?
        tell me what {x} means
        what exactly is {x}?
        in simple words, what is {x}?
        I do not understand {x}
        help me understand {x}
        I want to know what {x} is
        I have heard of {x}, what is it?
        give me a short explanation of {x}
        meaning of {x}
        who can explain {x}?
        what is the idea of {x}?
        I have a question about {x}
        somebody mentioned {x}, what did they mean?
        what is {x} in one sentence?
        {explain|describe|define|clarify|outline|summarize} {x}{| to me| for me| in short| briefly| in one sentence| simply}
        {explain|describe|clarify} {x}{ to a child| to my boss| for an expert| quickly|, I am new here| for my homework| once more| again}
        {can|could|will|would} you {explain|describe|clarify|introduce} {x}{| to me| in short| briefly| to my friend| with few words}?
        {I read|I heard|somebody talked|my colleague asked} about {x}{|, what is it?|, what does it mean?|, can you explain?}
        {my boss asked|people talk|the docs talk} about {x}{|, what is it?|, what does it mean?|, can you explain?}
        {give|show|write|send} me {a|one|some} {summary|explanation|overview|idea|introduction|information|sentence} {of|about|on|for} {x}
        {I have trouble with|I struggle with|I am confused by|I am learning about|I am interested in|I forgot about|I am new to} {x}
        {what|tell me what|so what} {x} {is|means|is about|stands for}
        what can you {tell me|say} about {x}?
        how does {x} work?
        why does {x} matter?
        what is {x} {used for|good for|about|in this field|in practice|to you|when serving models}?
        what is the {point|role|concept|nature|sense} of {x}?
        what do {people|engineers|experts|they|we} {mean by|call} {x}?
        """,
        """
        give me a definition of {x}
        how would you explain {x} to a beginner?
        teach me about {x}
        I keep reading about {x}: what is that?
        what should I know about {x}?
        """,
    ),
    "thing": _frames(
        """
        what does {x} do?
        what does the {noun} {x} do?
        what is {x}?
        what's {x}?
        what is the {noun} {x}?
        what is {x} for?
        what is the {noun} {x} for?
        what is {x} good for?
        what does {x} mean?
        explain {x}
        explain the {noun} {x}
        can you explain {x}?
        please explain {x} to me
        tell me about {x}
        tell me about the {noun} {x}
        describe {x}
        {x}?
        {x}
        what do you know about {x}?
        do you know what {x} does?
        could you tell me what {x} does?
        what is the purpose of {x}?
        what happens when I use {x}?
        how do I use {x}?
        when do I need {x}?
        I do not understand {x}
        I have a question about {x}
        help me with {x}
        help with the {noun} {x}
        what is {x} in one sentence?
        {explain|describe|clarify|outline|summarize} {x}{| to me| for me| in short| briefly| in one sentence| simply}
        {explain|describe|clarify} {x}{ to my boss| quickly|, I am new here| once more}
        {can|could|will|would} you {explain|describe|clarify} {x}{| to me| in short| briefly| with few words}?
        {I read about|I found|I noticed|somebody mentioned} {x}{|, what is it?|, what does it do?|, can you explain?}
        {my colleague uses|the docs mention|there is} {x}{|, what is it?|, what does it do?|, can you explain?}
        {give|show|write|send} me {a|one|some} {summary|explanation|overview|introduction|information|sentence} {of|about|on|for} {x}
        {I have trouble with|I struggle with|I am confused by|I am interested in|I forgot about|I am new to} {x}
        {what|so what|tell me what} {x} {is|does|means|is about|stands for}
        what can you {tell me|say} about {x}?
        {why|when|where} {do I need|do people need|would one need|do I see} {x}?
        what is the {point|role|effect|job|sense|reason} of {x}?
        what can {x} do for me?
        """,
        """
        what is the use of {x}?
        I saw {x} somewhere, what is it for?
        give me a short description of {x}
        why would I use {x}?
        what should I know about the {noun} {x}?
        """,
    ),
    "flag": _frames(
        """
        what does {x} do?
        what does the flag {x} do?
        what does the option {x} do?
        what is {x}?
        what is the flag {x}?
        what is {x} for?
        what is the option {x} good for?
        what does {x} mean?
        what does {x} control?
        what does {x} set?
        explain {x}
        explain the flag {x}
        can you explain {x}?
        tell me about {x}
        tell me about the setting {x}
        describe {x}
        {x}?
        {x}
        what do you know about {x}?
        could you tell me what {x} does?
        what is the purpose of {x}?
        what happens if I set {x}?
        how do I use {x}?
        when do I need {x}?
        I do not understand {x}
        help with {x}
        {explain|describe|clarify|outline|summarize} {x}{| to me| for me| in short| briefly| in one sentence| simply}
        {explain|describe|clarify} {x}{ to my boss| quickly|, I am new here| once more}
        {can|could|will|would} you {explain|describe|clarify} {x}{| to me| in short| briefly| with few words}?
        {I read about|I found|I noticed|somebody mentioned} {x}{|, what is it?|, what does it do?|, can you explain?}
        {my colleague uses|the docs mention|there is} {x}{|, what is it?|, what does it do?|, can you explain?}
        {give|show|write|send} me {a|one|some} {summary|explanation|overview|introduction|information|sentence} {of|about|on|for} {x}
        {I have trouble with|I struggle with|I am confused by|I am interested in|I forgot about|I am new to} {x}
        {what|so what|tell me what} {x} {is|does|means|is about|stands for}
        what can you {tell me|say} about {x}?
        {why|when|where} {do I need|do people need|would one need|do I see} {x}?
        what is the {point|role|effect|job|sense|reason} of {x}?
        what can {x} do for me?
        """,
        """
        what does the setting {x} change?
        why would I set {x}?
        I saw {x} in a command line, what is it for?
        give me a short description of {x}
        """,
    ),
    "default": _frames(
        """
        what is the default of {x}?
        what's the default of {x}?
        default of {x}
        default of {x}?
        what is the default value of {x}?
        what is {x} by default?
        which value does {x} have by default?
        if I do not set {x}, what is used?
        what happens without {x}?
        tell me the default of {x}
        what does {x} default to?
        what is the value of {x} if I leave it out?
        what is the standard value of {x}?
        does {x} have a default?
        which default has {x}?
        {x} default
        {what|which} {is|would be} {the standard|the normal|the usual|the initial|the preset} {value|setting|choice} {of|for} {x}?
        {what|which value} {do I get|is taken|applies|is used} {without|if I omit|when I skip|if I forget} {x}?
        {say|show me|name|remind me of|I need|I forgot|look up} the default {of|for} {x}
        what is {x} {set to|at the start|when not given|out of the box|normally|usually}?
        """,
        """
        when I leave {x} out, which value is used?
        give me the default value of {x}
        do you know the default of {x}?
        """,
    ),
    "which flag": _frames(
        """
        which flag {x}?
        what flag {x}?
        what is the flag that {x}?
        which option {x}?
        which setting {x}?
        is there a flag that {x}?
        is there an option that {x}?
        name the flag that {x}
        tell me the flag that {x}
        I need a flag that {x}
        do you know which flag {x}?
        which command line flag {x}?
        {what|which} {parameter|argument|switch|knob} {x}?
        {show me|give me|I need|I want|find|where is} {the|a} {flag|option|switch|setting} {that|which} {x}
        {remind me|tell me|say|show me}, {which|what} {flag|option} {x}?
        what do I {pass|add|write|give|set}: which flag {x}?
        """,
        """
        I am looking for the option that {x}
        what is the setting that {x}?
        can you name the flag that {x}?
        """,
    ),
    "howto": _frames(
        """
        how do I {x}?
        how do I {x}?
        how can I {x}?
        how could I {x}?
        how to {x}
        how to {x}?
        how do you {x}?
        how does one {x}?
        what is the command to {x}?
        which command do I use to {x}?
        show me how to {x}
        can you show me how to {x}?
        tell me how to {x}
        explain how to {x}
        I want to {x}
        I would like to {x}
        I need to {x}
        I am trying to {x}
        what do I type to {x}?
        what do I have to do to {x}?
        what do I need to {x}?
        please help me to {x}
        help me {x}
        is there a way to {x}?
        is it possible to {x}?
        can I {x}?
        {what|which} {steps|command|flags|settings} {do I need|are needed|are necessary} to {x}?
        {what|how} {must|shall|should|can|could} {I|we|one|a user} do to {x}?
        {show|tell|explain to|remind} me, how {do|can} I {x}?
        {where|how} {do I start|do I begin} if I {want|need|have} to {x}?
        {my boss wants|my colleague wants|we want|we need|somebody asked} me to {x}
        {I have no idea|I do not know|I forgot} how to {x}
        {is there|do you have|does tk have} {a|any|some} {command|flag|way|option|trick} to {x}?
        {instructions|guide|help|steps|advice|example} {for how to|to|on how to} {x}
        {quick|short} {help|answer}: how {do|can} I {x}?
        """,
        """
        what is the best way to {x}?
        how would I {x}?
        teach me how to {x}
        what should I do to {x}?
        """,
    ),
    "difference": _frames(
        """
        what is the difference between {x}?
        what's the difference between {x}?
        what are the differences between {x}?
        difference between {x}
        the difference between {x}?
        explain the difference between {x}
        can you explain the difference between {x}?
        tell me the difference between {x}
        how do {x} differ?
        how are {x} different?
        compare {x}
        {x}: what is the difference?
        what distinguishes {x}?
        I do not understand the difference between {x}
        I always mix up {x}
        {tell me|explain|describe|show me|summarize} {how|why} {x} {differ|are different|are not the same}
        {are|why are} {x} {the same|not the same|different things|related}?
        {what|which} {is|are} the {main|key|real|big|important} {difference|differences|distinction} {of|between} {x}?
        {I confuse|I am confused by|I read about|help me with|tell me about|clarify} {x}
        """,
        """
        in what way are {x} different?
        can you compare {x} for me?
        what makes {x} different from each other?
        """,
    ),
    "topic": _frames(
        """
        tell me {x}
        can you tell me {x}?
        could you tell me {x}?
        please tell me {x}
        do you know {x}?
        I want to know {x}
        I would like to know {x}
        explain {x}
        explain to me {x}
        I wonder {x}
        what about {x}?
        {x}
        {x}?
        what can you say about {x}?
        {say|show me|describe|clarify|summarize} {x}
        {I need to know|I must know|I want to understand|I do not understand|I do not know|I forgot|I asked} {x}
        {can|could|will|would} you {say|clarify|describe|show me} {x}?
        {my boss|my colleague|somebody|a friend} {asks|asked|wants to know} {x}
        {do you|does anybody|who can} {know|understand|say|tell me} {x}?
        {any idea|remind me|help me understand|give me an idea}: {x}
        """,
        """
        can you explain {x}?
        I am curious about {x}
        I have been asking myself {x}
        """,
    ),
    "sum": _frames(
        """
        what is {x}?
        what's {x}?
        how much is {x}?
        {x}
        {x}?
        {x} =
        {x} = ?
        calculate {x}
        compute {x}
        tell me {x}
        can you calculate {x}?
        what do you get for {x}?
        do you know what {x} is?
        please calculate {x}
        what does {x} make?
        {what|how much} {will|would} {x} {be|make|give}?
        {add up|work out|solve|determine|find|give me|show me} {x}
        {the answer of|the value of|quick maths:|maths:|my homework:|I need} {x}
        {could|would|will} you {compute|calculate|solve|work out} {x}?
        """,
        """
        what is the result of {x}?
        can you tell me what {x} is?
        how much do I get for {x}?
        """,
    ),
    "story": _frames(
        """
        tell me a story about {x}
        tell me a short story about {x}
        write a story about {x}
        write a short story about {x}
        can you tell me a story about {x}?
        a story about {x}
        a story about {x}, please
        please tell me a story about {x}
        I want to hear a story about {x}
        story about {x}
        tell a story with {x}
        make up a story about {x}
        {give|show|invent|read|send} me a {|small |nice |funny |little |short }{story|tale|fairy tale} {about|with|of} {x}
        {could|would|will} you {tell|write|invent} a {|small |nice |funny |little }{story|tale} about {x}?
        {I need|I want|let me have|my child wants} a {|small |nice |little |short }{story|tale} {about|with} {x}
        """,
        """
        do you know a story about {x}?
        could you write me a very short story about {x}?
        I would like a story about {x}
        """,
    ),
}

STORY_REQUEST = "{tell me|tell|write} a {|short }story"
CLUE_QUESTIONS = (
    "{x}",
    "{x}",
    "{how do I|how can I|can I|where do I|I want to|how would one} {| get| do| see| have} {x}",
    "{what is|what's|what about|what does it mean:|what do you call} {|the |a |this }{x}",
    "{why|when|where|which|who|how|what} {is|does|do|are|has|means|} {|the |it |my |there }{x}",
    "{is there|is it|are there|do I need|does it have|can it do|I need|I want} {|a |the |some }{x}",
    "{my|the|a|it|it is|this|we have|I have|I get|there is} {x}",
    "{my|the} {server|model|request|answer|user|program|machine} {x}",
    "{something|anything|question|problem|trouble|help} {with|about|on|for|concerning} {x}",
    "{the thing|the word|the part|what|the setting|the way} {for|of|with|that is|to} {x}",
    "{tell me about|explain|show me|say more on} {x}",
)
DEFAULT_QUESTIONS = (
    "{what is|which|how much|how many|how big is|what's} {|the }{normal|usual|standard|initial|preset} {|value for }{x}",
    "{x} {normally|out of the box|if I say nothing|when unset|if I change nothing|from the start|by itself}",
    "{what|which|how much|how many|where|how|is} {x} {is used|do I get|is it|applies} "
    "{normally|out of the box|if I say nothing|when unset}",
    "{do I have to set|must I give|what if I give no|what if I leave out|without|unchanged} {x}",
)
COMPARISONS = (
    "{0} {or|versus|vs|compared with|and|against|rather than} {1}{|, which one|, what changes|, which is better}",
    "{which is|what is|when do I take|should I use|is it} {0} {or|and|versus} {1}",
    "{two kinds|two ways|which of the two}: {0}, {1}",
    "{is|are} {0} the same as {1}",
    "{why|how} is {0} {unlike|different from|not} {1}",
)
_STRAY_WORDS = """
able above across after afternoon against ago almost along already also always among amount animal
another anyone anything apart apple area around article ask away back bad bag because become before
behind below beside between big bird black blue board body boss both bottom box boy bread break
bring brother brown building bus busy but buy call came car card care case cat chair chance child
church city class clean clear close cloud coffee cold color come common complete cook corner cost
could country couple course cover cup cut dark date daughter deal dear decide deep dinner doctor dog
done door double doubt down draw dream dress drink drive drop dry during each ear early earth east
easy eat edge egg eight either else empty end enough enter especially even evening event ever every
exactly example except eye face fact fall family far farm fast father feel feet felt few field fight
figure fill final find fine finger finish fire first fish five floor fly follow food foot force
forest forget form forward four free fresh friend from front fruit full funny further game garden
general gentle girl glad glass gold gone grass great green group grow guess hair half hand happen
happy hard hat head hear heart heavy height hello help here herself high hill himself history hold
hole holiday home honest hope horse hot hotel hour house huge human hundred hungry hurry husband ice
idea ill important inside instead island job join joke journey jump just keep key kind kitchen knee
knife knock lady lake land language large last late later laugh law lay lazy lead leaf leave left
leg less letter level library lie life lift light like line lion list listen little live long look
lose lot loud love low luck lunch machine mail main make man many map mark market matter maybe meal
meat meet member middle might mile milk mind minute miss moment money monkey month moon morning most
mother mountain mouth move much music must name near nearly neck need neighbour neither never news
next nice night nine nobody noise none north nose note nothing notice now number ocean offer office
often oil old once only open opinion orange order other our outside over own page paint pair paper
parent park part party past pay peace pen people pepper perhaps person phone photo piece pig place
plain plan plant plate play please plenty pocket point police poor possible potato pretty price
print problem pull push put quarter queen question quick quiet quite radio rain rather reach ready
real really reason red remember repeat rest rice rich ride right ring rise river road rock roof room
rope round rule run sad safe salt same sand save say school sea season seat second secret see seem
sell send sentence serious seven several shade shall shape share sharp she sheep ship shirt shoe
shop short should shoulder shout show shut side sign silver simple since sing sister sit six size
skin sky sleep slow small smile snow soap soft soldier some somebody something son song soon sorry
sort sound soup south space speak special speed spell spend spoon sport spring square stairs stand
star start station stay steel still stone story straight strange street strong student study such
sudden sugar summer sun sure surprise sweet swim table tail take talk tall taste tea teacher team
tell ten tennis thick thin thing think third though thought three through throw ticket tie time
tired today together tomorrow tonight too top total touch toward town toy train travel tree trip
trouble true trust truth try turn twelve twenty twice two under understand until upon usual valley
very view village visit voice wait walk wall want warm wash watch water wave weak wear weather
wedding week weight well west wet wheel where white whole wide wife wild wind window wine winter
wish without woman wonder wood word work world worry write wrong yard year yellow yesterday yet
young zero zoo
"""
_THINGS = """
apple arm art aunt autumn bag ball banana bank bath beach bean bear bed beer belt bicycle bottle
bowl brain brick broom bucket bus butter button cake camera candy cave cheese cherry chicken
chocolate cinema circus coat coffee comb concert cookie corn cotton cow cream crown cucumber curtain
desert desk dessert diamond dinner dress drum eagle egg elbow engine fence ferry fever field flag
flood flour flute forest fork fountain fridge furniture garlic ghost glove grape grass guitar hammer
harbour hat helmet honey hospital hotel insect jacket jam jeans juice jungle kettle kitchen knife
ladder lake lemon lettuce lipstick lunch marriage meat medicine melon milk mirror mud museum
mushroom nail necklace needle nest novel nut onion opera orange oven parrot peach pear pepper
perfume piano picnic pillow pilot pizza planet plum poetry pond potato pyramid rabbit rainbow
restaurant rice ribbon sandwich sauce scarf scissors sculpture shampoo shirt shoulder skirt sofa
soup spinach stomach storm strawberry sugar suitcase supermarket sweater tea theatre thunder toast
tomato tooth towel tractor trousers trumpet umbrella uncle vegetable vinegar violin volcano wallet
wedding wine winter wool yoghurt zebra
"""
_HELD_OUT_WORDS = {
    word.strip("?:,")
    for frames in FRAMES.values()
    for text in frames.held_out
    for word in text.split()
}

STRAY_WORDS = tuple(word for word in _STRAY_WORDS.split() if word not in _HELD_OUT_WORDS)
"""Words that can be inserted into any question without changing it. None is in a held-out frame."""

THINGS = tuple(_THINGS.split())
"""Things that the model knows nothing about."""
