//! Inputs made of other inputs: the same ones for the same seed.

/// A small generator of numbers (SplitMix64), so that a run can be repeated.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, or 0.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(limit.max(1)).unwrap()).unwrap()
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }
}

/// Bytes that a number or a text changes its meaning with.
const TELLING: &[u8] = b"\0\n\r\t \"%'+,-./0123456789:=?@Z[]{}~\x7f\x80\xff";

/// An input with one to six changes.
pub(crate) fn mutated(dice: &mut Dice, corpus: &[Vec<u8>], words: &[Vec<u8>]) -> Vec<u8> {
    const LONGEST: usize = 8192;
    let mut input = corpus[dice.below(corpus.len())].clone();
    for _ in 0..=dice.below(6) {
        let at = dice.below(input.len() + 1);
        match dice.below(9) {
            0 if at < input.len() => input[at] ^= 1 << dice.below(8),
            1 if at < input.len() => input[at] = TELLING[dice.below(TELLING.len())],
            2 if at < input.len() => input[at] = dice.byte(),
            3 => input.truncate(at),
            4 => {
                let end = at + dice.below(input.len() - at + 1).min(16);
                input.drain(at..end);
            }
            // The end of another one, from anywhere in it.
            5 => {
                let other = &corpus[dice.below(corpus.len())];
                let from = dice.below(other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            6 => {
                let end = at + dice.below(input.len() - at + 1).min(64);
                let again = input[at..end].to_vec();
                input.splice(at..at, again);
            }
            // A word in the place of as many bytes, or of a run of digits.
            7 if !words.is_empty() => {
                let word = words[dice.below(words.len())].clone();
                let digits = input[at..]
                    .iter()
                    .take_while(|b| b.is_ascii_digit())
                    .count();
                let gone = [0, digits, word.len().min(input.len() - at)][dice.below(3)];
                input.splice(at..at + gone, word);
            }
            _ => input.insert(at, TELLING[dice.below(TELLING.len())]),
        }
    }
    input.truncate(LONGEST);
    input
}

/// The words of a dictionary as libFuzzer reads it: one in quotes on a line, with `\xNN` escapes.
pub(crate) fn dictionary(text: &str) -> Vec<Vec<u8>> {
    let lines = text.lines().map(str::trim);
    let quoted = lines.filter_map(|line| line.strip_prefix('"')?.strip_suffix('"'));
    quoted.map(unescaped).collect()
}

fn unescaped(word: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = word.bytes();
    while let Some(byte) = rest.next() {
        match (byte, byte == b'\\') {
            (_, false) => bytes.push(byte),
            (_, true) => match rest.next() {
                Some(b'x') => {
                    let digits = [rest.next().unwrap(), rest.next().unwrap()];
                    let digits = std::str::from_utf8(&digits).unwrap();
                    bytes.push(u8::from_str_radix(digits, 16).unwrap());
                }
                other => bytes.extend(other),
            },
        }
    }
    bytes
}
