//! The report: one HTML file that needs nothing else, neither scripts nor anything from elsewhere.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use super::check::{Section, Verdict};
use super::plan::{Arm, Lane};
use super::{Outcome, Told};
use crate::output::human;

const STYLE: &str = include_str!("report.css");

/// How much time one strip of the timeline shows.
const STRIP_US: u64 = 5_000_000;

/// How many strips are shown, each of one set of locks; of a longer run or of more locks, those with
/// the most to see.
const STRIPS_MAX: usize = 60;

/// The geometry of a strip, in tenths of the SVG's units.
const LEFT: u64 = 700;
const WIDTH: u64 = 9_800;
const ROW: u64 = 150;
const BAR: u64 = 110;
const HEAD: u64 = 160;
const LANE_GAP: u64 = 60;

/// The narrowest bar that its token fits into.
const LABEL_MIN: u64 = 300;

/// The page.
pub(crate) fn html(told: &Told<'_>) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>fencelock torture: {}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n",
        text(told.store)
    );
    head(&mut page, told);
    figures(&mut page, told);
    violations(&mut page, told.verdict);
    timeline(&mut page, told);
    how(&mut page, told);
    let _ = write!(
        page,
        "<footer>Written by fencelock {}. Times are milliseconds since the beginning of the run, on one clock of one host.</footer>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION")
    );
    page
}

// Writing into a String cannot fail, here and below.

fn head(page: &mut String, told: &Told<'_>) {
    let plan = told.plan;
    let (class, word, why) = match told.outcome {
        Outcome::Held => (
            "held",
            "Held.",
            "No promise was broken, and no acknowledged update was lost where the watermark is raised before reading.".to_owned(),
        ),
        Outcome::Violated => (
            "violated",
            "Violated.",
            format!("{} times a promise was broken.", told.verdict.violations_total),
        ),
        Outcome::ProvedNothing(why) => ("nothing", "Proved nothing.", format!("{why}.")),
    };
    let _ = write!(
        page,
        "<h1>fencelock torture</h1>\n<p class=\"faint\">{} · {} clients · {} locks in each workload · TTL {} · {} · seed {}</p>\n\
         <div class=\"verdict {class}\"><strong>{word}</strong> {}</div>\n",
        text(told.store),
        plan.clients,
        plan.locks,
        human(plan.ttl),
        human(Duration::from_millis(told.played.took_us / 1_000)),
        plan.seed,
        text(&why)
    );
    let _ = writeln!(
        page,
        "<p>{} operations under {} grants. {} times a holder went on to write after another had been granted its lock: it had looked at its lock, and was paused, or its write was late. No lock can help there; what the storage did about it is in the table.</p>",
        told.verdict.operations, told.verdict.grants, told.verdict.overlaps
    );
}

fn figures(page: &mut String, told: &Told<'_>) {
    page.push_str(
        "<h2>Updates by arm</h2>\n<div class=\"scroll\"><table>\n<tr><th>Arm</th><th class=\"number\">Acknowledged</th><th class=\"number\">Lost</th><th class=\"number\">Lost %</th><th></th><th class=\"number\">Refused</th><th class=\"number\">Unknown</th><th class=\"number\">of them done</th></tr>\n",
    );
    for (arm, figures) in &told.verdict.arms {
        // In tenths of a per cent, so that a little is to be seen.
        let width = (figures.lost * 1_000)
            .checked_div(figures.acknowledged)
            .unwrap_or(0)
            .min(1_000);
        let _ = writeln!(
            page,
            "<tr><td><strong>{arm}</strong><br><span class=\"faint\">{}</span></td><td class=\"number\">{}</td><td class=\"number\">{}</td><td class=\"number\">{:.2}</td><td style=\"width:20%\"><span class=\"bar\" style=\"width:{}.{}%\"></span></td><td class=\"number\">{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td></tr>",
            described(*arm),
            figures.acknowledged,
            figures.lost,
            figures.lost_percent(),
            width / 10,
            width % 10,
            figures.refused,
            figures.indeterminate,
            figures.settled,
        );
    }
    page.push_str("</table></div>\n<p class=\"faint\">All arms do the same work in the same critical sections, each on values of its own. An update is counted for each object that it changes. Unknown: the answer never came; the final reading says which of them were done.</p>\n");
    page.push_str("<h2>Faults</h2>\n<div class=\"scroll\"><table>\n<tr>");
    for fault in &told.plan.faults {
        let _ = write!(page, "<th class=\"number\">{fault}</th>");
    }
    page.push_str("</tr>\n<tr>");
    for fault in &told.plan.faults {
        let times = told.played.faults.get(fault).copied().unwrap_or(0);
        let _ = write!(page, "<td class=\"number\">{times}</td>");
    }
    page.push_str("</tr>\n</table></div>\n");
}

fn described(arm: Arm) -> &'static str {
    match arm {
        Arm::Unfenced => "the lock alone: reads and writes, and nobody looks at a token",
        Arm::Naive => "writes with its token, which may not be smaller than any before",
        Arm::Raise => "raises the watermark, which reads; writes with the whole fence",
    }
}

fn violations(page: &mut String, verdict: &Verdict) {
    page.push_str("<h2>Violations</h2>\n");
    if verdict.violations.is_empty() {
        page.push_str("<p>None. Checked were L1 to L9, and S1 to S11, as far as a history can show them.</p>\n");
        return;
    }
    page.push_str("<div class=\"scroll\"><table>\n<tr><th>Promise</th><th>Workload</th><th>Object</th><th>Evidence</th><th>Tokens</th><th class=\"number\">At ms</th></tr>\n");
    for violation in &verdict.violations {
        let object = violation.object.as_deref().unwrap_or("the lock");
        let arm = violation
            .arm
            .map_or(String::new(), |arm| format!(" ({arm})"));
        let tokens: Vec<String> = violation.tokens.iter().map(u64::to_string).collect();
        let at = violation
            .at_us
            .map_or(String::new(), |t| (t / 1_000).to_string());
        let _ = writeln!(
            page,
            "<tr><td><strong>{}</strong></td><td>{}</td><td>{}{arm}</td><td>{}</td><td><code>{}</code></td><td class=\"number\">{at}</td></tr>",
            violation.promise,
            violation.lane,
            text(object),
            text(&violation.evidence),
            tokens.join(" ")
        );
    }
    page.push_str("</table></div>\n");
    let kept = super::check::count(verdict.violations.len());
    if verdict.violations_total > kept {
        let _ = writeln!(page, "<p>And {} more.</p>", verdict.violations_total - kept);
    }
}

fn timeline(page: &mut String, told: &Told<'_>) {
    page.push_str("<h2>Who believed when</h2>\n<ul class=\"key\">\n");
    let key = |page: &mut String, shape: &str, words: &str| {
        let _ = writeln!(
            page,
            "<li><svg viewBox=\"0 0 36 14\" aria-hidden=\"true\">{shape}</svg>{words}</li>"
        );
    };
    key(
        page,
        "<rect class=\"hold\" y=\"1\" width=\"36\" height=\"11\" rx=\"2\"/>",
        "a holder, with the end of its token",
    );
    key(
        page,
        "<rect class=\"over\" y=\"1\" width=\"36\" height=\"11\" rx=\"2\"/>",
        "the same, after a newer grant: it does not know",
    );
    key(
        page,
        "<rect class=\"hold\" y=\"1\" width=\"36\" height=\"11\" rx=\"2\"/><rect class=\"nap\" y=\"1\" width=\"36\" height=\"11\"/>",
        "paused",
    );
    key(
        page,
        "<circle class=\"yes\" cx=\"18\" cy=\"7\" r=\"4\"/>",
        "a write with raise, accepted",
    );
    key(
        page,
        "<path class=\"no\" d=\"M14 3l8 8m0-8l-8 8\"/>",
        "a write with raise, refused",
    );
    key(
        page,
        "<rect class=\"late\" x=\"14\" y=\"3\" width=\"8\" height=\"8\" transform=\"rotate(45 18 7)\"/>",
        "a late write without fencing or with the naive check, accepted",
    );
    page.push_str("</ul>\n");
    let sections = &told.verdict.sections;
    let last = sections.iter().map(Section::end).max().unwrap_or(0);
    let strips = last / STRIP_US + 1;
    let all = strips * u64::from(told.plan.locks);
    let chosen = chosen(sections, strips, told.plan.locks);
    if super::check::count(chosen.len()) < all {
        let _ = writeln!(
            page,
            "<p class=\"faint\">Of {all} strips, each {} s of one lock of each workload, the {} with the most late writes are shown.</p>",
            STRIP_US / 1_000_000,
            chosen.len()
        );
    }
    // Once for the page: the pattern of a pause.
    page.push_str("<svg width=\"0\" height=\"0\" style=\"position:absolute;min-width:0;width:0\" aria-hidden=\"true\"><defs><pattern id=\"nap\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\"><path class=\"stripe\" d=\"M0 0V5\"/></pattern></defs></svg>\n<div class=\"scroll\">\n");
    for (number, set) in chosen {
        let here: Vec<&Section> = sections.iter().filter(|s| s.set == set).collect();
        if told.plan.locks > 1 {
            let _ = writeln!(page, "<p class=\"faint\">Locks number {set}</p>");
        }
        strip(page, &here, number, &told.plan.lanes);
    }
    page.push_str("</div>\n");
}

/// The strips that are shown, and of which locks: all, or those with the most late writes, in their
/// order.
fn chosen(sections: &[Section], strips: u64, sets: u32) -> Vec<(u64, u32)> {
    let mut late: BTreeMap<(u64, u32), u64> = BTreeMap::new();
    for section in sections.iter().filter(|section| section.overlaps()) {
        *late
            .entry((section.end() / STRIP_US, section.set))
            .or_default() += 1;
    }
    let all = (0..strips).flat_map(|strip| (0..sets).map(move |set| (strip, set)));
    let mut ranked: Vec<(u64, u32)> = all.collect();
    if ranked.len() <= STRIPS_MAX {
        return ranked;
    }
    ranked.sort_by_key(|strip| std::cmp::Reverse(late.get(strip).copied().unwrap_or(0)));
    ranked.truncate(STRIPS_MAX);
    ranked.sort_unstable();
    ranked
}

/// One strip: a band for each workload, and in it as many rows as believed at once.
fn strip(page: &mut String, sections: &[&Section], number: u64, lanes: &[Lane]) {
    let (from, to) = (number * STRIP_US, (number + 1) * STRIP_US);
    let mut y = HEAD;
    let mut drawing = String::new();
    for lane in lanes {
        let mut here: Vec<&Section> = sections
            .iter()
            .copied()
            .filter(|s| s.lane == *lane && s.told < to && s.end() >= from)
            .collect();
        here.sort_by_key(|section| section.told);
        // The end of what each row holds.
        let mut rows: Vec<u64> = Vec::new();
        let mut marks = String::new();
        let mut bars = String::new();
        for section in here {
            let row = match rows.iter().position(|end| *end <= section.told) {
                Some(row) => row,
                None => {
                    rows.push(0);
                    rows.len() - 1
                }
            };
            if let Some(end) = rows.get_mut(row) {
                *end = section.end();
            }
            let top = y + u64::try_from(row).unwrap_or(0) * ROW + (ROW - BAR) / 2;
            bar(&mut bars, &mut marks, section, from, to, top);
        }
        let height = u64::try_from(rows.len().max(1)).unwrap_or(1) * ROW;
        let _ = write!(
            drawing,
            "<rect class=\"band\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/><text class=\"lane\" x=\"0\" y=\"{}\">{lane}</text>{bars}{marks}",
            tenths(LEFT),
            tenths(y),
            tenths(WIDTH),
            tenths(height),
            tenths(y + 110)
        );
        y += height + LANE_GAP;
    }
    let mut axis = String::new();
    for second in 0..=STRIP_US / 1_000_000 {
        let x = LEFT + second * WIDTH * 1_000_000 / STRIP_US;
        let anchor = if second == STRIP_US / 1_000_000 {
            "end"
        } else {
            "start"
        };
        let _ = write!(
            axis,
            "<line class=\"rule\" x1=\"{x}\" x2=\"{x}\" y1=\"10\" y2=\"{bottom}\"/><text class=\"axis\" x=\"{x}\" y=\"8\" text-anchor=\"{anchor}\">{} s</text>",
            from / 1_000_000 + second,
            x = tenths(x),
            bottom = tenths(y),
        );
    }
    let _ = writeln!(
        page,
        "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"holders from {} to {} s\">{drawing}{axis}</svg>",
        tenths(LEFT + WIDTH),
        tenths(y),
        from / 1_000_000,
        to / 1_000_000
    );
}

fn bar(bars: &mut String, marks: &mut String, section: &Section, from: u64, to: u64, top: u64) {
    let x = |t: u64| LEFT + (t.clamp(from, to) - from) * WIDTH / STRIP_US;
    let rect = |class: &str, start: u64, end: u64| {
        let (left, right) = (x(start), x(end).max(x(start) + 8));
        format!(
            "<rect class=\"{class}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>",
            tenths(left),
            tenths(top),
            tenths(right - left),
            tenths(BAR)
        )
    };
    let end = section.end();
    let turned = section
        .superseded
        .map_or(end, |t| t.clamp(section.told, end));
    let outcome = match (&section.ended, section.cut) {
        (Some((_, outcome)), _) => outcome.as_str(),
        (None, Some(_)) => "killed",
        (None, None) => "not ended",
    };
    let _ = write!(
        bars,
        "<g><title>token {} of client {} (life {}): granted at {} ms, {outcome} at {} ms</title>",
        section.token,
        section.client,
        section.life,
        section.told / 1_000,
        end / 1_000
    );
    if section.told < to && turned >= from {
        bars.push_str(&rect("hold", section.told, turned));
    }
    if turned < end && turned < to && end >= from {
        bars.push_str(&rect("over", turned, end));
    }
    for (start, stop) in &section.pauses {
        let stop = stop.unwrap_or(end).min(end);
        if *start < to && stop >= from && *start < stop {
            bars.push_str(&rect("nap", *start, stop));
        }
    }
    let (left, right) = (x(section.told), x(end));
    if right - left >= LABEL_MIN {
        let _ = write!(
            bars,
            "<text class=\"token\" x=\"{}\" y=\"{}\">{}</text>",
            tenths(left + 30),
            tenths(top + 85),
            label(section.token)
        );
    }
    bars.push_str("</g>");
    for (t, arm, accepted) in &section.writes {
        if !(from..to).contains(t) {
            continue;
        }
        let (cx, cy) = (x(*t), top + BAR / 2);
        let is_late = section.superseded.is_some_and(|newer| newer < *t);
        let _ = match (arm, accepted) {
            (Arm::Raise, true) => write!(
                marks,
                "<circle class=\"yes\" cx=\"{}\" cy=\"{}\" r=\"3\"/>",
                tenths(cx),
                tenths(cy)
            ),
            (Arm::Raise, false) => write!(
                marks,
                "<path class=\"no\" d=\"M{} {}l7 7m0-7l-7 7\"/>",
                tenths(cx.saturating_sub(35)),
                tenths(cy.saturating_sub(35))
            ),
            (_, true) if is_late => write!(
                marks,
                "<rect class=\"late\" x=\"{}\" y=\"{}\" width=\"5.6\" height=\"5.6\" transform=\"rotate(45 {} {})\"/>",
                tenths(cx.saturating_sub(28)),
                tenths(cy.saturating_sub(28)),
                tenths(cx),
                tenths(cy)
            ),
            _ => Ok(()),
        };
    }
}

/// The end of a token: enough to tell neighbours apart.
fn label(token: u64) -> String {
    if token < 100_000 {
        token.to_string()
    } else {
        format!("…{:04}", token % 10_000)
    }
}

fn how(page: &mut String, told: &Told<'_>) {
    let _ = write!(
        page,
        "<h2>Again</h2>\n<pre><code>{}</code></pre>\n<p class=\"faint\">A seed repeats what goes wrong and when; how the processes meet is the machine's. Passwords and options of URLs are left out. Values went to {}.</p>\n",
        text(&told.command),
        told.storages
            .iter()
            .map(|storage| format!("<code>{}</code>", text(storage)))
            .collect::<Vec<_>>()
            .join(" and ")
    );
}

/// Tenths as a decimal number.
fn tenths(n: u64) -> String {
    if n.is_multiple_of(10) {
        (n / 10).to_string()
    } else {
        format!("{}.{}", n / 10, n % 10)
    }
}

/// Text, safe between tags and in attributes.
fn text(raw: &str) -> String {
    let mut safe = String::with_capacity(raw.len());
    for c in crate::output::clean(raw).chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torture::check::{Figures, Violation};
    use crate::torture::plan::{Fault, Plan};
    use crate::torture::stage::Played;

    #[test]
    fn a_page_shows_figures_violations_and_who_was_late_and_needs_nothing_else() {
        let plan = Plan {
            arms: vec![Arm::Raise],
            lanes: vec![Lane::List],
            faults: vec![Fault::Pause],
            clients: 2,
            locks: 1,
            updates: None,
            duration: Duration::from_secs(1),
            ttl: Duration::from_secs(1),
            sections: 1,
            seed: 7,
            report: None,
        };
        let late = Section {
            lane: Lane::List,
            set: 0,
            op: "0.0.2".parse().unwrap(),
            client: 0,
            life: 0,
            token: 1_796_000_000_123_456,
            asked: 0,
            told: 1_000,
            until: 1_000_000,
            release_sent: None,
            ended: None,
            cut: Some(6_500_000),
            last_write: Some(6_000_000),
            pauses: vec![(2_000, Some(5_900_000))],
            superseded: Some(1_100_000),
            writes: vec![
                (6_000_000, Arm::Raise, false),
                (6_100_000, Arm::Unfenced, true),
            ],
        };
        let mut verdict = Verdict {
            violations: vec![Violation {
                promise: "S6",
                lane: Lane::List,
                arm: Some(Arm::Raise),
                object: Some("list".to_owned()),
                evidence: "<script>1 & 2".to_owned(),
                tokens: vec![5],
                at_us: Some(1_000),
            }],
            violations_total: 3,
            sections: vec![late],
            ..Verdict::default()
        };
        let figures = Figures {
            acknowledged: 8,
            lost: 1,
            ..Figures::default()
        };
        verdict.arms.insert(Arm::Raise, figures);
        let played = Played::default();
        let page = html(&Told {
            plan: &plan,
            store: "redis://h:1",
            storages: vec!["redis://h:1"],
            played: &played,
            verdict: &verdict,
            outcome: Outcome::Violated,
            command: "fencelock torture".to_owned(),
        });
        for said in [
            "Violated.",
            "12.50",
            "width:12.5%",
            "&lt;script&gt;1 &amp; 2",
            "And 2 more",
            "…3456",
            "class=\"over\"",
            "class=\"no\"",
            "class=\"late\"",
            "killed at 6500 ms",
        ] {
            assert!(page.contains(said), "{said}");
        }
        assert!(!page.contains("<script"), "no scripts");
        assert!(!page.contains("http"), "nothing from elsewhere");
        // One strip for each five seconds.
        assert_eq!(page.matches("role=\"img\"").count(), 2);
    }

    #[test]
    fn of_a_long_run_the_strips_with_late_writes_are_shown() {
        assert_eq!(chosen(&[], 3, 1), [(0, 0), (1, 0), (2, 0)]);
        assert_eq!(chosen(&[], 1_000, 4).len(), STRIPS_MAX);
    }
}
