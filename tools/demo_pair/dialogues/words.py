"""Slot words of the generated dialogues: names, places, things, and facts to ask for.

Contract: plain tuples and dicts, written by hand for this project. Facts are of the kind every
atlas or school book states. No logic.
"""

from __future__ import annotations

NAMES = tuple(
    "Anna Ben Clara David Emma Felix Grace Henry Ines Jack Kira Leo Mia Noah Olivia Paul Quinn Rosa Sam Tina Uma Victor Wendy "
    "Xavier Yara Zoe Adam Bella Carlos Diana Elias Fatima George Hannah Ivan Julia Karim Laura Marco Nina Oscar Petra Rahul "
    "Sofia Tom Ursula Vera Walter Yusuf Alice Bruno Chloe Daniel Eva Frank Gloria Hugo Irene James Kate Lukas Maria Nadia Omar "
    "Peter Rita Simon Theo Vincent Amir Aisha Chen Mei Hiro Yuki Priya Arjun Kofi Ama Lena Jonas Freya Erik Astrid Mateo Lucia "
    "Pablo Elena Boris Olga Dmitri Sara Ali Leila Hassan Maya Ravi Kenji Sana Tariq Zara Ethan Lily Max Ruby Oliver Isla Finn "
    "Nora Toby Ella Jacob Molly Dylan Alex Robin Charlie Jordan Casey Morgan Taylor Riley Jamie Avery Sasha Kim Lee Pat Chris".split()
)
SURNAMES = tuple(
    "Smith Jones Brown Miller Garcia Rossi Weber Novak Silva Kim Chen Singh Khan Ali Meyer Dubois Larsen Costa Wood Hill Green "
    "Baker Young King Scott Adams Clark Lewis Walker Hall Allen Wright Turner Parker Collins Stewart Morris Rogers Reed Cook".split()
)
CITIES = tuple(
    "London Paris Berlin Madrid Rome Vienna Lisbon Oslo Prague Warsaw Athens Dublin Boston Chicago Denver Seattle Toronto Sydney "
    "Melbourne Tokyo Osaka Seoul Mumbai Delhi Cairo Nairobi Lagos Lima Bogota Munich Hamburg Milan Naples Porto Geneva Zurich "
    "Brussels Krakow Budapest Helsinki Stockholm Bergen Glasgow Leeds Bristol Austin Dallas Miami Houston Atlanta Portland".split()
)
JOBS = tuple(
    "teacher,nurse,baker,driver,farmer,student,doctor,engineer,painter,gardener,writer,lawyer,pilot,cook,carpenter,plumber,"
    "librarian,musician,designer,programmer,scientist,waiter,tailor,dentist,firefighter,police officer,photographer,mechanic,"
    "electrician,accountant,journalist,architect,biologist,chemist,sailor,singer,actor,translator,postman,shop assistant".split(
        ","
    )
)
HOBBIES = tuple(
    "reading,cooking,hiking,swimming,painting,running,cycling,gardening,chess,fishing,dancing,singing,photography,knitting,"
    "climbing,sailing,skiing,football,tennis,basketball,yoga,drawing,baking,camping,birdwatching,playing the piano,"
    "playing the guitar,playing video games,watching films,writing stories,collecting stamps,learning languages".split(
        ","
    )
)
COLOURS = tuple(
    "red,blue,green,yellow,orange,purple,pink,brown,black,white,grey,silver,gold,turquoise,violet,beige,navy,maroon,teal,olive,"
    "crimson,cream,indigo,lilac".split(",")
)
ANIMALS = tuple(
    "dog,cat,horse,cow,sheep,goat,pig,rabbit,fox,wolf,bear,lion,tiger,elephant,giraffe,zebra,monkey,kangaroo,koala,panda,"
    "deer,mouse,squirrel,hedgehog,badger,otter,beaver,frog,turtle,snake,lizard,crocodile,dolphin,whale,seal,penguin,owl,eagle,"
    "parrot,duck,goose,swan,robin,sparrow,crow,camel,donkey,llama,hamster".split(",")
)
FRUITS = tuple(
    "apple,banana,orange,pear,grape,cherry,strawberry,mango,peach,plum,kiwi,lemon,lime,pineapple,blueberry,raspberry,"
    "watermelon,melon,apricot,fig,papaya,coconut,grapefruit,blackberry,pomegranate".split(",")
)
VEGETABLES = tuple(
    "carrot,potato,tomato,onion,cucumber,cabbage,spinach,broccoli,pea,bean,pepper,pumpkin,leek,celery,lettuce,beetroot,"
    "radish,turnip,cauliflower,aubergine,courgette,mushroom,garlic,sweetcorn".split(",")
)
THINGS = tuple(
    "book,lamp,chair,table,bottle,bag,phone,laptop,pen,notebook,clock,mirror,umbrella,jacket,shoe,hat,key,cup,plate,spoon,"
    "blanket,pillow,candle,basket,box,ticket,map,camera,guitar,bicycle,ball,kite,scarf,glove,ring,watch,vase,ladder,hammer,"
    "bucket,brush,rope,torch,tent,suitcase,desk,shelf,printer,keyboard,mug".split(",")
)
ADJECTIVES = tuple(
    "small,big,old,new,quiet,loud,bright,dark,warm,cold,soft,hard,heavy,light,clean,dusty,round,square,tall,short,happy,sad,"
    "brave,shy,clever,gentle,kind,proud,lazy,busy,curious,hungry,tired,strange,lovely,broken,shiny,wooden,golden,tiny".split(
        ","
    )
)
PLACES = tuple(
    "forest,village,river,mountain,garden,castle,harbour,market,library,school,farm,island,valley,meadow,cave,bridge,tower,"
    "kitchen,station,park,beach,lake,field,desert,museum,bakery,workshop,lighthouse,barn,orchard".split(
        ","
    )
)
VERBS_PAST = tuple(
    "found,lost,painted,carried,bought,sold,cleaned,repaired,hid,borrowed,opened,closed,moved,dropped,watched,liked,"
    "remembered,forgot,wanted,needed".split(",")
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = tuple(
    "January February March April May June July August September October November December".split()
)
SEASONS = ("spring", "summer", "autumn", "winter")
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
CONTINENTS = ("Africa", "Antarctica", "Asia", "Europe", "North America", "Oceania", "South America")

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "Afghanistan:Kabul,Albania:Tirana,Algeria:Algiers,Angola:Luanda,Argentina:Buenos Aires,Armenia:Yerevan,"
        "Australia:Canberra,Austria:Vienna,Azerbaijan:Baku,Bahrain:Manama,Bangladesh:Dhaka,Belarus:Minsk,Belgium:Brussels,"
        "Bhutan:Thimphu,Bosnia and Herzegovina:Sarajevo,Botswana:Gaborone,Brazil:Brasilia,Bulgaria:Sofia,"
        "Cambodia:Phnom Penh,Cameroon:Yaounde,Canada:Ottawa,Chad:N'Djamena,Chile:Santiago,China:Beijing,Colombia:Bogota,"
        "Costa Rica:San Jose,Croatia:Zagreb,Cuba:Havana,Cyprus:Nicosia,the Czech Republic:Prague,Denmark:Copenhagen,"
        "Ecuador:Quito,Egypt:Cairo,Eritrea:Asmara,Estonia:Tallinn,Ethiopia:Addis Ababa,Fiji:Suva,Finland:Helsinki,"
        "France:Paris,Gabon:Libreville,Georgia:Tbilisi,Germany:Berlin,Ghana:Accra,Greece:Athens,Guatemala:Guatemala City,"
        "Guinea:Conakry,Haiti:Port-au-Prince,Honduras:Tegucigalpa,Hungary:Budapest,Iceland:Reykjavik,India:New Delhi,"
        "Indonesia:Jakarta,Iran:Tehran,Iraq:Baghdad,Ireland:Dublin,Italy:Rome,Jamaica:Kingston,Japan:Tokyo,Jordan:Amman,"
        "Kazakhstan:Astana,Kenya:Nairobi,Kuwait:Kuwait City,Laos:Vientiane,Latvia:Riga,Lebanon:Beirut,Liberia:Monrovia,"
        "Libya:Tripoli,Lithuania:Vilnius,Luxembourg:Luxembourg,Madagascar:Antananarivo,Malawi:Lilongwe,"
        "Malaysia:Kuala Lumpur,Mali:Bamako,Malta:Valletta,Mexico:Mexico City,Moldova:Chisinau,Mongolia:Ulaanbaatar,"
        "Montenegro:Podgorica,Morocco:Rabat,Mozambique:Maputo,Myanmar:Naypyidaw,Namibia:Windhoek,Nepal:Kathmandu,"
        "the Netherlands:Amsterdam,New Zealand:Wellington,Nicaragua:Managua,Niger:Niamey,Nigeria:Abuja,"
        "North Macedonia:Skopje,Norway:Oslo,Oman:Muscat,Pakistan:Islamabad,Panama:Panama City,Paraguay:Asuncion,Peru:Lima,"
        "the Philippines:Manila,Poland:Warsaw,Portugal:Lisbon,Qatar:Doha,Romania:Bucharest,Russia:Moscow,Rwanda:Kigali,"
        "Saudi Arabia:Riyadh,Senegal:Dakar,Serbia:Belgrade,Sierra Leone:Freetown,Singapore:Singapore,Slovakia:Bratislava,"
        "Slovenia:Ljubljana,Somalia:Mogadishu,South Africa:Pretoria,South Korea:Seoul,Spain:Madrid,Sudan:Khartoum,"
        "Sweden:Stockholm,Switzerland:Bern,Syria:Damascus,Tanzania:Dodoma,Thailand:Bangkok,Togo:Lome,Tunisia:Tunis,"
        "Turkey:Ankara,Uganda:Kampala,Ukraine:Kyiv,the United Arab Emirates:Abu Dhabi,the United Kingdom:London,"
        "the United States:Washington D.C.,Uruguay:Montevideo,Uzbekistan:Tashkent,Venezuela:Caracas,Vietnam:Hanoi,"
        "Yemen:Sana'a,Zambia:Lusaka,Zimbabwe:Harare"
    ).split(",")
)
