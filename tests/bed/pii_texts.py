"""Texts of a device's users, with personal data whose place is known: the load of the guard's detectors.

Written before the detectors, and without looking at them: log lines, mails, invoices, chat and code in six languages,
in three sets. Detectors are chosen on set `a`; set `b` showed two mistakes, which were mended; set `c` was written
later, and nothing was changed for it. About half of the texts have no personal data, but
what looks like some: dates, order numbers, versions, hashes, ISBNs, tracking numbers, coordinates and assets.

Slots are `{class}`; all others are harmless. Values come from public numbering plans and formats.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

LANGUAGES = ("en", "de", "fr", "es", "it", "pt")

# --- personal ---------------------------------------------------------------------------------------------------------

PERSONAL: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "a": {
        "en": (
            "Hi team,\nplease move my booking to Friday. You can reach me at {email} or {phone}.\nThanks, {first}",
            "Invoice {order}: please transfer {price} to {iban} by {date}.",
            "can u charge the card {card} again? the exp is {expiry}",
            "My new number is {phone}, the old one stops working on {date}.",
            "Customer {first} ({email}) complained about order {order}; refund {price}.",
        ),
        "de": (
            "Guten Tag,\nbitte rufen Sie mich unter {phone} zurück oder schreiben Sie an {email}.\nMit Gruß\n{first}",
            "Rechnung {order} vom {date}: Bitte überweisen Sie {price} auf das Konto {iban}.",
            "kannst du die karte {card} nochmal belasten? gültig bis {expiry}",
            "Tel.: {phone}, Mail: {email}, Kundennummer {order}",
        ),
        "fr": (
            "Bonjour,\nmerci de me rappeler au {phone} ou de m'écrire à {email}.\nCordialement, {first}",
            "Facture {order} du {date} : veuillez virer {price} sur le compte {iban}.",
            "tu peux débiter la carte {card} encore une fois ? elle expire {expiry}",
            "Téléphone : {phone} — dossier {order}",
        ),
        "es": (
            "Buenos días:\nllámeme al {phone} o escríbame a {email}.\nUn saludo, {first}",
            "Factura {order} de {date}: transfiera {price} a la cuenta {iban}.",
            "¿puedes cobrar otra vez la tarjeta {card}? caduca el {expiry}",
            "Móvil: {phone}. Pedido {order}.",
        ),
        "it": (
            "Buongiorno,\nmi richiami al {phone} oppure scriva a {email}.\nCordiali saluti, {first}",
            "Fattura {order} del {date}: bonifico di {price} sul conto {iban}.",
            "puoi addebitare di nuovo la carta {card}? scade {expiry}",
            "Cellulare: {phone}, ordine {order}",
        ),
        "pt": (
            "Bom dia,\nligue-me para o {phone} ou escreva para {email}.\nCumprimentos, {first}",
            "Fatura {order} de {date}: transfira {price} para a conta {iban}.",
            "podes cobrar outra vez o cartão {card}? expira em {expiry}",
            "Telemóvel: {phone}; encomenda {order}",
        ),
        "log": (
            '{ip} - - [{clf}] "GET /orders/{order} HTTP/1.1" 200 5316 "-" "curl/8.5.0"',
            "{iso} sshd[4711]: Failed password for root from {ip} port 51122 ssh2",
            "{iso} dnsmasq-dhcp: DHCPACK(eth0) {ip} {mac} laptop",
            'level=warn user={email} msg="login from new address" addr={ip6}',
        ),
        "code": (
            "client = Client(token={quote}{key}{quote})\nclient.run()",
            "export AWS_ACCESS_KEY_ID={aws}\nexport AWS_REGION=eu-central-1",
            "# TODO({first}): ask {email} about the retry policy\nfor i in range(10):\n    step(i)",
            "HOSTS = [{quote}{ip}{quote}, {quote}{ip}{quote}]",
        ),
    },
    "b": {
        "en": (
            "Dear Sir or Madam,\nI have been waiting since {date}. Kindly answer to {email}, or call {phone}.",
            "Remittance advice\nBeneficiary IBAN: {iban}\nAmount: {price}\nReference: {order}",
            "pay with {card} pls, cvc comes separately",
            "She told me to text her on {phone} after {time}.",
            "Forwarded message from: {first} <{email}>\nTo: support\nSubject: parcel {order}",
        ),
        "de": (
            "Hallo zusammen, ich bin ab {time} unter der Nummer {phone} erreichbar. Gruß {first}",
            "Kontoverbindung: {iban}, Betrag {price}, Verwendungszweck {order}",
            "Bitte die Kreditkarte {card} hinterlegen, danke!",
            "Schick das einfach an {email}, dann antworte ich bis {date}.",
        ),
        "fr": (
            "Salut, appelle-moi sur mon portable {phone} après {time}.",
            "Coordonnées bancaires : {iban}\nMontant : {price}\nRéférence : {order}",
            "Le paiement par carte bancaire {card} a été refusé le {date}.",
            "Écrivez à {email} avant le {date}, s'il vous plaît.",
        ),
        "es": (
            "Hola, mi teléfono es {phone}, llámame después de las {time}.",
            "Datos bancarios: {iban}; importe {price}; referencia {order}",
            "El pago con la tarjeta {card} fue rechazado el {date}.",
            "Envíalo a {email} antes del {date}, por favor.",
        ),
        "it": (
            "Ciao, il mio numero di telefono è {phone}, chiamami dopo le {time}.",
            "Coordinate bancarie: {iban}, importo {price}, causale {order}",
            "Il pagamento con la carta {card} è stato rifiutato il {date}.",
            "Mandalo a {email} entro il {date}, per favore.",
        ),
        "pt": (
            "Olá, o meu telefone é {phone}, liga-me depois das {time}.",
            "Dados bancários: {iban}; montante {price}; referência {order}",
            "O pagamento com o cartão {card} foi recusado em {date}.",
            "Envia para {email} até {date}, por favor.",
        ),
        "log": (
            '{{"ts":"{iso}","client":"{ip}","path":"/v1/jobs/{uuid}","ms":12}}',
            "{iso} kernel: wlan0: associated with {mac} (rssi -61)",
            "{iso} postfix/smtp[99]: to=<{email}>, relay=mx[{ip}]:25, status=sent",
            "{iso} nginx: upstream timed out, client: {ip6}, server: api, request: POST /chat",
        ),
        "code": (
            "curl -H {quote}Authorization: Bearer {key}{quote} $URL/v2/items",
            "[default]\naws_access_key_id = {aws}\noutput = json",
            "const owner = {{ mail: {quote}{email}{quote}, id: {order} }};",
            "iptables -A INPUT -s {ip} -j DROP  # mac {mac}",
        ),
    },
    "c": {
        "en": (
            "Please update my contact details: {phone} (work), {email} (home). Effective {date}.",
            "Hi, it's {first}. I left my umbrella in room {small}, could you ring {phone}?",
            "Refund to the original card ending soon: {card}, amount {price}, case {order}.",
            "Direct debit mandate\nAccount holder: {first}\nIBAN {iban}\nFirst collection {date}",
            "cc: {email}; agenda attached, we start {time} sharp",
        ),
        "de": (
            "Neuer Kontakt: {first}, {phone}, {email}",
            "Könnten Sie mir die Rechnung {order} an {email} schicken? Danke!",
            "SEPA-Mandat: {first}, {iban}, erste Abbuchung am {date} über {price}",
            "Der Kunde möchte mit Karte {card} zahlen, Termin {date} {time}.",
            "Rückfragen bitte telefonisch: {phone} (werktags bis {time})",
        ),
        "fr": (
            "Nouveau contact : {first}, {phone}, {email}",
            "Merci d'envoyer le devis {order} à l'adresse {email} avant {time}.",
            "Mandat SEPA : {first}, {iban}, premier prélèvement le {date}, {price}",
            "Le client souhaite payer avec la carte {card}, rendez-vous le {date}.",
            "Pour toute question : tél. {phone}, du lundi au vendredi",
        ),
        "es": (
            "Nuevo contacto: {first}, {phone}, {email}",
            "¿Me puede enviar el presupuesto {order} a {email}? Gracias.",
            "Mandato SEPA: {first}, {iban}, primer cargo el {date}, {price}",
            "El cliente quiere pagar con la tarjeta {card}, cita el {date} a las {time}.",
            "Para dudas, teléfono {phone}, de lunes a viernes",
        ),
        "it": (
            "Nuovo contatto: {first}, {phone}, {email}",
            "Può inviarmi il preventivo {order} a {email}? Grazie.",
            "Mandato SEPA: {first}, {iban}, primo addebito il {date}, {price}",
            "Il cliente vuole pagare con la carta {card}, appuntamento il {date}.",
            "Per domande: tel. {phone}, dal lunedì al venerdì",
        ),
        "pt": (
            "Novo contacto: {first}, {phone}, {email}",
            "Pode enviar-me o orçamento {order} para {email}? Obrigado.",
            "Mandato SEPA: {first}, {iban}, primeiro débito em {date}, {price}",
            "O cliente quer pagar com o cartão {card}, marcação em {date} às {time}.",
            "Em caso de dúvida: telefone {phone}, de segunda a sexta",
        ),
        "log": (
            "{iso} INFO auth user={quote}{email}{quote} method=password result=ok peer={ip}",
            "{iso} hostapd: wlan1: STA {mac} IEEE 802.11: authenticated",
            "{iso} ntpd[{small}]: peer {ip6} unreachable for {small} polls",
            "{iso} firewall DROP IN=eth0 SRC={ip} LEN={small} ID={order}",
        ),
        "code": (
            "git remote set-url origin https://oauth2:{key}@git.example.com/app.git",
            "env:\n  - name: AWS_ACCESS_KEY_ID\n    value: {aws}",
            "assert parse({quote}{iban}{quote}).country == {quote}DE{quote}",
            "ping -c {small} {ip} || mail -s down {email}",
        ),
    },
}

# --- clean ------------------------------------------------------------------------------------------------------------

CLEAN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "a": {
        "en": (
            "The meeting on {date} at {time} is about order {order}; the budget is {price}.",
            "Parcel {tracking} left the depot at {time}. ISBN {isbn}.",
            "Turn the heating to {small} degrees at {time} and dim the lights by {small} percent.",
        ),
        "de": (
            "Die Besprechung am {date} um {time} betrifft Auftrag {order}, das Budget beträgt {price}.",
            "Paket {tracking} hat das Lager um {time} verlassen. ISBN {isbn}.",
            "Stell die Heizung um {time} auf {small} Grad und das Licht auf {small} Prozent.",
        ),
        "fr": (
            "La réunion du {date} à {time} porte sur la commande {order} ; budget {price}.",
            "Le colis {tracking} a quitté le dépôt à {time}. ISBN {isbn}.",
            "Règle le chauffage sur {small} degrés à {time}.",
        ),
        "es": (
            "La reunión del {date} a las {time} trata del pedido {order}; presupuesto {price}.",
            "El paquete {tracking} salió del almacén a las {time}. ISBN {isbn}.",
            "Pon la calefacción a {small} grados a las {time}.",
        ),
        "it": (
            "La riunione del {date} alle {time} riguarda l'ordine {order}; budget {price}.",
            "Il pacco {tracking} ha lasciato il deposito alle {time}. ISBN {isbn}.",
            "Metti il riscaldamento a {small} gradi alle {time}.",
        ),
        "pt": (
            "A reunião de {date} às {time} é sobre a encomenda {order}; orçamento {price}.",
            "A encomenda {tracking} saiu do armazém às {time}. ISBN {isbn}.",
            "Põe o aquecimento a {small} graus às {time}.",
        ),
        "log": (
            "{iso} engine[812]: loaded model in {small}.{small} s, sha256={sha}",
            "{iso} INFO request {uuid} took {small} ms, build {version}, commit {short}",
            "{iso} gps fix {coordinate}, satellites {small}, epoch {epoch}",
        ),
        "code": (
            "background: url(logo@2x.png); /* {version} */\nmargin: {small}px {small}px;",
            "std::vector<int> add::beef(dead::a x) {{ return {{ {small}, {small} }}; }}",
            "@dataclass\nclass A:\n    x: int = {small}\n    y: float = {small}.{small}",
        ),
    },
    "b": {
        "en": (
            "Coach LH{small} departs {date}, {time}; seat {small}A, booking {order}, total {price}.",
            "Please compare article {ean} with {isbn}; stock: {small}, {small} and {small}.",
            "Summarise the last {small} chapters and translate section {small}.{small}.{small}.",
        ),
        "de": (
            "Der Zug ICE {small} fährt am {date} um {time}, Platz {small}, Auftrag {order}, Preis {price}.",
            "Artikel {ean} bitte mit {isbn} vergleichen; Bestand {small}, {small} und {small}.",
            "Fasse die letzten {small} Kapitel zusammen, dann Abschnitt {small}.{small}.{small}.",
        ),
        "fr": (
            "Le train TGV {small} part le {date} à {time}, place {small}, dossier {order}, prix {price}.",
            "Comparez l'article {ean} avec {isbn} ; stock : {small}, {small} et {small}.",
            "Résume les {small} derniers chapitres, puis la section {small}.{small}.{small}.",
        ),
        "es": (
            "El tren AVE {small} sale el {date} a las {time}, plaza {small}, reserva {order}, precio {price}.",
            "Compare el artículo {ean} con {isbn}; existencias: {small}, {small} y {small}.",
            "Resume los últimos {small} capítulos y la sección {small}.{small}.{small}.",
        ),
        "it": (
            "Il treno FR {small} parte il {date} alle {time}, posto {small}, prenotazione {order}, prezzo {price}.",
            "Confronta l'articolo {ean} con {isbn}; scorte: {small}, {small} e {small}.",
            "Riassumi gli ultimi {small} capitoli e la sezione {small}.{small}.{small}.",
        ),
        "pt": (
            "O comboio AP {small} parte em {date} às {time}, lugar {small}, reserva {order}, preço {price}.",
            "Compare o artigo {ean} com {isbn}; existências: {small}, {small} e {small}.",
            "Resume os últimos {small} capítulos e a secção {small}.{small}.{small}.",
        ),
        "log": (
            "{iso} worker-{small}: job {uuid} done, {small} tokens, digest {sha}",
            "{iso} chrome/{version} navigated, frame {small}, snowflake {snowflake}",
            "{iso} sensor t={small}.{small} pos={coordinate} ts={epoch}000000",
        ),
        "code": (
            "npm i react@{version} @types/node@{version} # {short}",
            "use crate::a1::b2; let id = Uuid::parse_str({quote}{uuid}{quote})?; // {small}",
            "SELECT * FROM t WHERE id = {snowflake} AND day = '{date}' LIMIT {small};",
        ),
    },
    "c": {
        "en": (
            "Plane BA{small} on {date}: gate {small}, boarding {time}, reference {order}.",
            "The recipe needs {small} eggs and {small} grams of yeast; bake at {small}0 degrees until {time}.",
            "Model {version} of the firmware fixes issue {order}; serial {tracking}.",
        ),
        "de": (
            "Flug LH{small} am {date}: Ausgang {small}, Einstieg {time}, Buchung {order}.",
            "Das Rezept braucht {small} Eier und {small} Gramm Hefe; bei {small}0 Grad backen bis {time}.",
            "Stand {version} der Software behebt Fehler {order}; Seriennummer {tracking}.",
        ),
        "fr": (
            "Vol AF{small} le {date} : porte {small}, embarquement {time}, dossier {order}.",
            "La recette demande {small} œufs et {small} grammes de levure ; cuire à {small}0 degrés jusqu'à {time}.",
            "La version {version} du logiciel corrige le défaut {order} ; série {tracking}.",
        ),
        "es": (
            "Vuelo IB{small} el {date}: puerta {small}, embarque {time}, localizador {order}.",
            "La receta lleva {small} huevos y {small} gramos de levadura; hornear a {small}0 grados hasta las {time}.",
            "La versión {version} del programa corrige el fallo {order}; serie {tracking}.",
        ),
        "it": (
            "Volo AZ{small} il {date}: uscita {small}, imbarco {time}, codice {order}.",
            "La ricetta vuole {small} uova e {small} grammi di lievito; cuocere a {small}0 gradi fino alle {time}.",
            "La versione {version} del programma corregge il difetto {order}; serie {tracking}.",
        ),
        "pt": (
            "Voo TP{small} em {date}: porta {small}, embarque {time}, código {order}.",
            "A receita leva {small} ovos e {small} gramas de fermento; assar a {small}0 graus até às {time}.",
            "A versão {version} do programa corrige o defeito {order}; série {tracking}.",
        ),
        "log": (
            "{iso} kubelet: pulled image sha256:{sha} in {small}.{small}s",
            "{iso} trace={uuid} span={short} duration_ns={snowflake}",
            "{iso} gps fix {coordinate} alt={small}.{small} sats={small}",
        ),
        "code": (
            "pip install app=={version} --hash=sha256:{sha}",
            "INSERT INTO orders VALUES ({order}, '{date}', {epoch}, '{ean}');",
            "@app.get({quote}/v{small}/items/{{id}}{quote})\nasync def item(id: int) -> Item: ...",
        ),
    },
}

# --- values -----------------------------------------------------------------------------------------------------------

_FIRST = ("Anna", "Jürgen", "Zoë", "Miguel", "Chiara", "Inês", "Tom", "Aylin", "Paweł", "Noor")
_LAST = ("meyer", "o'brien", "garcia", "rossi", "silva", "dupont", "kowalski", "van-dijk", "lindqvist", "khan")
_DOMAINS = ("example.org", "mail.example.com", "firma.example.de", "bücher.example.net", "dept.uni.example.edu",
            "startup.io", "posteo.example", "correo.example.es")  # fmt: skip
_CARDS = (("4", 16), ("51", 16), ("55", 16), ("2221", 16), ("34", 15), ("37", 15), ("6011", 16), ("3530", 16),
          ("36", 14), ("62", 16))  # fmt: skip
_IBANS = {"DE": "nnnnnnnnnnnnnnnnnn", "FR": "nnnnnnnnnnccccccccccc" "nn", "ES": "nnnnnnnnnnnnnnnnnnnn",
          "IT": "annnnnnnnnncccccccccccc", "PT": "nnnnnnnnnnnnnnnnnnnnn", "GB": "aaaannnnnnnnnnnnnn",
          "NL": "aaaannnnnnnnnn", "CH": "nnnnncccccccccccc"}  # fmt: skip
_PHONES: Mapping[str, tuple[str, ...]] = {
    "en": ("+1 415-55#-####", "(212) 55#-####", "415.55#.####", "+44 7911 12####", "07911 12####", "+44 20 7946 0###"),
    "de": ("+49 151 2345####", "0151 2345####", "0151/2345####", "+49 (0)30 901820###", "030 9018####",
           "0049 89 2180####"),
    "fr": ("+33 6 12 34 ## ##", "06 12 34 ## ##", "06.12.34.##.##", "+33 1 42 68 ## ##", "01 42 68 ## ##"),
    "es": ("+34 612 34# ###", "612 34# ###", "612 34 ## ##", "+34 91 411 ## ##", "914 11# ###"),
    "it": ("+39 347 12# ####", "347 12# ####", "+39 06 698 ####", "06 698 4####", "34712#####"),
    "pt": ("+351 912 34# ###", "912 34# ###", "+351 21 393 ####", "213 93# ###", "00351 912 34# ###"),
}  # fmt: skip
_ALNUM = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def luhn_digit(digits: str) -> str:
    """Return the check digit that makes a card number of these digits (ISO/IEC 7812-1, annex B)."""
    doubled = [int(one) * (2 if index % 2 == 0 else 1) for index, one in enumerate(reversed(digits))]
    return str(-sum(value - 9 if value > 9 else value for value in doubled) % 10)


def iban_of(country: str, account: str) -> str:
    """Return the IBAN of an account, with its check digits (ISO 13616)."""
    number = int("".join(str(int(one, 36)) for one in f"{account}{country}00"))
    return f"{country}{98 - number % 97:02}{account}"


class Value(NamedTuple):
    """A personal value in a text, and its class."""

    kind: str
    start: int
    end: int


class Text(NamedTuple):
    language: str
    text: str
    values: tuple[Value, ...]


class Writer:
    """Writes values of one language."""

    def __init__(self, rng: random.Random, language: str) -> None:
        self._rng, self._language = rng, language

    def _digits(self, count: int) -> str:
        return "".join(self._rng.choice("0123456789") for _ in range(count))

    def _of(self, letters: str, count: int) -> str:
        return "".join(self._rng.choice(letters) for _ in range(count))

    def email(self) -> str:
        first, last = self._rng.choice(_FIRST).lower(), self._rng.choice(_LAST)
        local = self._rng.choice((f"{first}.{last}", f"{first[0]}{last}", f"{first}+shop", f"{last}_{self._digits(2)}"))
        return f"{local}@{self._rng.choice(_DOMAINS)}"

    def phone(self) -> str:
        form = self._rng.choice(_PHONES[self._language])
        return "".join(self._digits(1) if one == "#" else one for one in form)

    def card(self) -> str:
        prefix, length = self._rng.choice(_CARDS)
        body = prefix + self._digits(length - 1 - len(prefix))
        number = body + luhn_digit(body)
        split = (4, 10) if length == 15 else (4, 10) if length == 14 else (4, 8, 12)
        parts = [number[a:b] for a, b in zip((0, *split), (*split, length), strict=True)]
        return self._rng.choice(("", " ", "-")).join(parts)

    def iban(self) -> str:
        country, form = self._rng.choice(tuple(_IBANS.items()))
        letters = {"n": "0123456789", "a": _UPPER, "c": _UPPER + "0123456789"}
        number = iban_of(country, "".join(self._rng.choice(letters[one]) for one in form))
        if self._rng.random() < 0.5:
            return number
        return " ".join(number[at : at + 4] for at in range(0, len(number), 4))

    def ip(self) -> str:
        return ".".join(str(self._rng.randint(*bounds)) for bounds in ((11, 223), (0, 255), (0, 255), (1, 254)))

    def ip6(self) -> str:
        groups = [f"{self._rng.randint(0x1000, 0xFFFF):x}" for _ in range(7)]
        local = ":".join(groups[2:5])
        return self._rng.choice((f"2001:{':'.join(groups)}", f"2001:db8::{groups[0]}:{groups[1]}", f"fe80::{local}"))

    def mac(self) -> str:
        pairs = [f"{self._rng.randint(0, 255):02x}" for _ in range(5)] + [f"a{self._rng.randint(0, 9)}"]
        return self._rng.choice((":".join(pairs), "-".join(pairs).upper()))

    def aws(self) -> str:
        return "AKIA" + self._of(_UPPER + "234567", 16)

    def key(self) -> str:
        return self._rng.choice((
            "ghp_" + self._of(_ALNUM, 36),
            "github_pat_" + self._of(_ALNUM, 22) + "_" + self._of(_ALNUM, 59),
            "glpat-" + self._of(_ALNUM, 20),
            "AIza" + self._of(_ALNUM, 35),
            "sk-proj-" + self._of(_ALNUM, 48),
            "xoxb-" + self._digits(12) + "-" + self._digits(12) + "-" + self._of(_ALNUM, 24),
        ))  # fmt: skip

    def first(self) -> str:
        return self._rng.choice(_FIRST)

    def order(self) -> str:
        return self._rng.choice((self._digits(8), f"A-{self._digits(7)}", f"{self._digits(4)}-{self._digits(5)}",
                                 f"20{self._digits(2)}/{self._digits(6)}", self._digits(10)))  # fmt: skip

    def price(self) -> str:
        return self._rng.choice((f"{self._digits(3)}.{self._digits(2)} EUR", f"1.{self._digits(3)},{self._digits(2)} €",
                                 f"${self._digits(4)}"))  # fmt: skip

    def date(self) -> str:
        day, month, year = self._rng.randint(1, 28), self._rng.randint(1, 12), self._rng.randint(2019, 2027)
        return self._rng.choice((f"{day:02}.{month:02}.{year}", f"{year}-{month:02}-{day:02}", f"{day}/{month}/{year}"))

    def time(self) -> str:
        hour, minute = self._rng.randint(0, 23), self._rng.randint(0, 59)
        return self._rng.choice((f"{hour:02}:{minute:02}", f"{hour}h{minute:02}", f"{hour:02}:{minute:02}:07"))

    def expiry(self) -> str:
        return f"{self._rng.randint(1, 12):02}/{self._rng.randint(26, 32)}"

    def iso(self) -> str:
        day, clock = f"0{self._rng.randint(1, 9)}-1{self._digits(1)}", f"1{self._digits(1)}:2{self._digits(1)}"
        return f"2026-{day}T{clock}:3{self._digits(1)}.{self._digits(6)}Z"

    def clf(self) -> str:
        return f"1{self._digits(1)}/Oct/2026:13:5{self._digits(1)}:36 +0200"

    def uuid(self) -> str:
        return "-".join(self._of("0123456789abcdef", size) for size in (8, 4, 4, 4, 12))

    def sha(self) -> str:
        return self._of("0123456789abcdef", 64)

    def short(self) -> str:
        return self._of("0123456789abcdef", 12)

    def version(self) -> str:
        return self._rng.choice(
            (
                f"{self._digits(1)}.{self._digits(2)}.{self._digits(1)}",
                f"12{self._digits(1)}.0.6{self._digits(3)}.{self._digits(2)}",
            )
        )

    def tracking(self) -> str:
        return self._rng.choice((self._digits(20), f"1Z{self._of(_UPPER, 3)}{self._digits(13)}", self._digits(12)))

    def isbn(self) -> str:
        return f"978-{self._digits(1)}-{self._digits(4)}-{self._digits(4)}-{self._digits(1)}"

    def ean(self) -> str:
        return f"40{self._digits(11)}"

    def coordinate(self) -> str:
        return f"{self._rng.randint(30, 60)}.{self._digits(6)}, {self._rng.randint(1, 30)}.{self._digits(6)}"

    def epoch(self) -> str:
        return f"17{self._digits(8)}"

    def snowflake(self) -> str:
        return f"1{self._digits(17)}"

    def small(self) -> str:
        return str(self._rng.randint(1, 30))

    def quote(self) -> str:
        return '"'


_KINDS = {"email": "email", "phone": "phone", "card": "card", "iban": "iban", "ip": "ip", "ip6": "ip", "mac": "mac",
          "aws": "secret", "key": "secret"}  # fmt: skip


def write(template: str, writer: Writer) -> tuple[str, tuple[Value, ...]]:
    """Fill a template; return the text and its personal values."""
    text, values, at = "", [], 0
    while at < len(template):
        if template.startswith(("{{", "}}"), at):
            text, at = text + template[at], at + 2
        elif template[at] == "{":
            end = template.index("}", at)
            slot = template[at + 1 : end]
            make: Callable[[], str] = getattr(writer, slot)
            found = make()
            if slot in _KINDS:
                values.append(Value(_KINDS[slot], len(text), len(text) + len(found)))
            text, at = text + found, end + 1
        else:
            text, at = text + template[at], at + 1
    return text, tuple(values)


def texts(count: int, seed: int, templates: str) -> list[Text]:
    """Return texts of all languages and kinds; every second one has no personal data.

    Args:
        templates: Set of templates, `a`, `b` or `c`.
    """
    rng, made = random.Random(seed), []
    for number in range(count):
        language = LANGUAGES[number % len(LANGUAGES)]
        writer = Writer(rng, language)
        source = rng.choice((language, language, language, "log", "code"))
        is_personal = (number // len(LANGUAGES)) % 2 == 0
        text, values = "", []
        for index in range(rng.randint(1, 4)):
            chosen = PERSONAL if is_personal and index == 0 else CLEAN
            piece, found = write(rng.choice(chosen[templates][source]), writer)
            text += "\n" if text else ""
            values += [Value(one.kind, one.start + len(text), one.end + len(text)) for one in found]
            text += piece
        made.append(Text(language, text, tuple(values)))
    return made
