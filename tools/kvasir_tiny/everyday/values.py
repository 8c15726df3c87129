"""What people tell: the lists of everyday life and the makers of values, small and odd ones among them."""

from __future__ import annotations

from collections.abc import Callable

from tools.kvasir_tiny.everyday import spelling
from tools.kvasir_tiny.everyday.spelling import WideNames
from tools.kvasir_tiny.words import CLOSED, Dice

Make = Callable[[Dice, WideNames], str]


def listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(";")]


RELATIVES = listed(
    "wife;husband;partner;girlfriend;boyfriend;fiancée;son;daughter;brother;sister;mother;father;mom;dad;mum;"
    "grandmother;grandfather;grandma;grandpa;aunt;uncle;cousin;nephew;niece;friend;colleague;neighbour;neighbor;"
    "roommate;flatmate;dog;cat;parrot;horse;hamster;rabbit;goldfish;turtle;snake;bird;kitten;puppy;pony;pet;baby;"
    "oldest son;youngest daughter;little brother;older sister;twin sister;first dog;dentist;lawyer;landlord;"
    "manager;coach;tutor;boat;car;bike"
)
KIN = listed("wife;husband;son;daughter;brother;sister;mother;father;aunt;uncle;cousin;friend;boss;neighbour;dog;cat")
HEADS = listed("best friend;teacher;doctor;boss;family name;last name;middle name;nickname;first name;surname")
JOBS = listed(
    "baker;pilot;painter;doctor;farmer;teacher;carpenter;sailor;cook;judge;tailor;nurse;gardener;engineer;writer;"
    "miner;potter;lawyer;plumber;electrician;mechanic;driver;truck driver;bus driver;taxi driver;waiter;waitress;"
    "barista;chef;butcher;fisherman;firefighter;police officer;soldier;student;scientist;data scientist;chemist;"
    "physicist;biologist;software engineer;software developer;programmer;web designer;designer;product manager;"
    "project manager;manager;salesperson;shop assistant;cashier;receptionist;secretary;librarian;journalist;"
    "editor;translator;photographer;musician;singer;dancer;director;producer;dentist;surgeon;vet;pharmacist;"
    "midwife;psychologist;therapist;social worker;priest;banker;broker;consultant;cleaner;janitor;gardener;"
    "florist;hairdresser;barber;personal trainer;football player;coach;tour guide;flight attendant;postman;"
    "courier;builder;bricklayer;roofer;welder;locksmith;watchmaker;jeweller;beekeeper;forester;diver;detective;"
    "spy;mayor;professor;researcher;actor;actress;artist;architect;accountant;astronaut;archaeologist;economist;"
    "electrical engineer;estate agent;inspector;instructor;interpreter;office clerk;optician;auditor;usher"
)
FAVOURITES = listed(
    "colour;food;drink;season;month;animal;place;book;film;movie;song;band;sport;game;number;day;team;singer;"
    "flower;fruit;city;country;dessert;author;writer;poet;painter;hobby;word;toy;vegetable;cheese;tea;wine;bird;"
    "tree;subject;show;restaurant;cafe;park;museum;ice cream;pizza;cake;language;instrument;holiday;planet;meal;"
    "snack;shop;beach;river"
)
VERBS = listed(
    "like|likes;love|loves;hate|hates;enjoy|enjoys;miss|misses;collect|collects;play|plays;study|studies;"
    "drive|drives;speak|speaks;write|writes;grow|grows;sell|sells;build|builds;cook|cooks;ride|rides;"
    "breed|breeds;paint|paints;teach|teaches;fear|fears;prefer|prefers;want|wants;need|needs;own|owns;"
    "repair|repairs;eat|eats;drink|drinks;want to buy|wants to buy;need to buy|needs to buy;"
    "want to learn|wants to learn;have to fix|has to fix"
)
STATES = listed(
    "allergic to;afraid of;good at;bad at;interested in;looking for;reading;learning;saving for;worried about;"
    "proud of;fond of;tired of;famous for;waiting for;writing;building;knitting;studying;planning;training for;"
    "scared of"
)
NOUNS = listed(
    "phone number;locker number;room number;badge number;door code;lucky number;pin;pin code;password;"
    "wifi password;secret word;secret;email;email address;address;street;home town;hometown;house number;"
    "flight number;flight;seat;train;car;licence plate;shoe size;hat size;height;weight;salary;budget;deadline;"
    "username;user name;account number;order number;ticket number;booking code;bank;school;university;company;"
    "team;project;goal;plan;dream;hobby;religion;star sign;blood type;mother tongue;nationality;country;hotel;"
    "hotel room;gate;zip code;postcode;code word;code name;motto;ringtone;laptop;phone;bike;boat;garden;kitchen;"
    "problem;question;idea;wish;diet;diagnosis;medicine;size;job title"
)
THINGS = listed(
    "wifi password;meeting room;code word;code;password;deadline;budget;answer;total;key word;magic word;"
    "project name;name of the ship;name of the hotel;capital of our game;winner;price;score;target;version;"
    "file name;server name;branch;port;room;address;phone number of the office;name of the cafe;plan;rule;theme;"
    "title;reason;dress code"
)
OBJECTS = listed(
    "key is|is the key;book is|is the book;car is|is the car;ladder is|is the ladder;passport is|is the passport;"
    "letter is|is the letter;map is|is the map;spare key is|is the spare key;charger is|is the charger;"
    "ring is|is the ring;keys are|are the keys;glasses are|are the glasses;tickets are|are the tickets;"
    "scissors are|are the scissors;documents are|are the documents;treasure is|is the treasure;"
    "milk is|is the milk;bike is|is the bike"
)
EVENTS = listed(
    "appointment;dentist appointment;meeting;interview;job interview;exam;flight;train;lesson;party;"
    "birthday party;wedding;concert;holiday;operation;lunch;dinner;date;anniversary;test;first day;class;haircut;"
    "deadline;vacation;trip"
)
PUBLIC_EVENTS = listed(
    "meeting;party;concert;film;game;wedding;exam;lesson;show;dinner;call;workshop;match;release;launch"
)
COUNTED = listed(
    "cats;dogs;children;kids;brothers;sisters;cousins;horses;chickens;fish;books;cars;bikes;friends;plants;keys;"
    "cows;goats"
)
NUMBERS = listed("two;three;four;five;six;seven;eight;nine;ten;eleven;twelve;twenty;thirty;a hundred;no")
WORKPLACES = listed(
    "at the hospital;at a school;in a bakery;at the airport;in a factory;at the bank;in a library;at home;"
    "on a farm;in a restaurant;on a ship;in an office;at the university;in a lab;at the post office;in a garage;"
    "in a shop;at a museum"
)


def job(dice: Dice, names: WideNames) -> str:
    if dice.chance(0.1):
        job = f"{names.word()} {dice.pick(['maker', 'seller', 'teacher', 'engineer', 'doctor', 'driver'])}"
    else:
        job = dice.pick(JOBS)
    draw = dice.random()
    if draw < 0.15:
        job = f"{dice.pick(['night', 'senior', 'junior', 'young', 'retired', 'assistant', 'head', 'part-time'])} {job}"
    return f"{'an' if job[0] in 'aeiou' and not job.startswith(('uni', 'us')) else 'a'} {job}"


def workplace(dice: Dice, names: WideNames) -> str:
    if dice.chance(0.5):
        return dice.pick(WORKPLACES)
    return f"{dice.pick(['at', 'for', 'with'])} {names.place() if dice.chance(0.6) else spelling.title(dice, names)}"


def name(_: Dice, names: WideNames) -> str:
    return names.full_name()


def place(dice: Dice, names: WideNames) -> str:
    if dice.chance(0.06):
        return dice.pick(["a small village", "the north", "a big city", "the mountains", "an old mill", "a flat"])
    return names.place()


def thing(dice: Dice, names: WideNames) -> str:
    draw = dice.random()
    if draw < 0.07:
        return spelling.phrase(dice, names, 9)
    if draw < 0.5:
        return spelling.phrase(dice, names)
    if draw < 0.62:
        return spelling.title(dice, names)
    if draw < 0.74:
        return dice.pick(CLOSED[dice.pick(list(CLOSED))])
    return names.word() if draw < 0.87 else names.full_name()


def anything(dice: Dice, names: WideNames) -> str:
    draw = dice.random()
    if draw < 0.25:
        return spelling.number(dice, names)
    return spelling.code(dice, names) if draw < 0.5 else thing(dice, names)


def person_or_thing(dice: Dice, names: WideNames) -> str:
    return names.person() if dice.chance(0.4) else thing(dice, names)


def when(dice: Dice, _: WideNames) -> str:
    draw = dice.random()
    day, month = dice.pick(CLOSED["day"]), dice.pick(CLOSED["month"])
    if draw < 0.3:
        return f"on {day}"
    if draw < 0.45:
        return dice.pick(["tomorrow", "tonight", "next week", "this weekend", "next month", "next year", "in an hour"])
    if draw < 0.6:
        return f"at {spelling.clock_time(dice)}"
    if draw < 0.7:
        return f"on {spelling.date(dice)}"
    if draw < 0.8:
        return f"in {month}"
    return dice.pick(
        [
            f"on {day} at {spelling.clock_time(dice)}",
            f"next {day}",
            f"on {day} morning",
            f"in {dice.between(2, 9)} days",
        ]
    )


_MAKING = listed("bake;buy;paint;repair;sell;clean;build;bring")
_DOING = listed("go swimming;see the dentist;stay at home;start a new job;move house;run a race")


def deed(dice: Dice, names: WideNames) -> str:
    return dice.pick(
        [
            f"visit {names.person()}",
            f"travel to {names.place()}",
            f"fly to {names.place()}",
            f"meet {names.person()} at {dice.pick(CLOSED['spot'])}",
            f"call {names.person()}",
            f"{dice.pick(_MAKING)} {spelling.phrase(dice, names, 2)}",
            dice.pick(_DOING),
            f"have {dice.pick(['lunch', 'dinner', 'coffee', 'breakfast'])} with {names.person()}",
        ]
    )


def where(dice: Dice, names: WideNames) -> str:
    spot = dice.pick(
        ["drawer", "kitchen", "car", "blue box", "cellar", "garden", "office", "bag", "fridge", "attic", "desk"]
    )
    draw = dice.random()
    if draw < 0.6:
        return f"{dice.pick(['in', 'under', 'behind', 'on', 'near'])} the {spot}"
    return f"in {names.place()}" if draw < 0.8 else f"with {names.person()}"


def noun(dice: Dice, names: WideNames) -> str:
    draw = dice.random()
    if draw < 0.7:
        return dice.pick(NOUNS)
    word = dice.pick(spelling.COMMON_WORDS)
    return f"{word} {dice.pick(['number', 'code', 'name', 'size', 'word', 'colour'])}" if draw < 0.85 else names.word()


def one_of(items: list[str]) -> Make:
    return lambda dice, _: dice.pick(items)


def count(dice: Dice, _: WideNames) -> str:
    return dice.pick(NUMBERS) if dice.chance(0.6) else str(dice.between(2, 99))


def age(dice: Dice, _: WideNames) -> str:
    return str(dice.between(3, 101))


def year(dice: Dice, _: WideNames) -> str:
    return str(dice.between(1920, 2024))
