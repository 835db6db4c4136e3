//! What fuzzing asks of the lines that a client tells, and of the checker that judges them: whatever
//! they say, it comes to a verdict.

use std::collections::BTreeMap;

use super::{Entry, Event, Op};
use crate::torture::check::{Final, Rules, check};
use crate::torture::plan::{Arm, Lane, page_of, set_of};

/// The input is lines as clients write them, of two clients in turn.
pub(crate) fn history(bytes: &[u8]) {
    let mut entries = Vec::new();
    for (line, client) in bytes.split(|byte| *byte == b'\n').zip((0..2).cycle()) {
        let text = String::from_utf8_lossy(line);
        if let Ok(op) = text.parse::<Op>() {
            assert_eq!(text.split('.').count(), 3, "{text:?}");
            assert_eq!(op.to_string().parse(), Ok(op));
        }
        let Ok((page, event)) = serde_json::from_slice::<(u32, Event)>(line) else {
            continue;
        };
        let again = serde_json::to_vec(&(page, &event)).unwrap();
        assert_eq!(
            serde_json::from_slice(&again).ok(),
            Some((page, event.clone()))
        );
        entries.push(Entry {
            client,
            life: 0,
            page,
            event,
        });
    }
    for sets in [1, 2, u32::MAX] {
        let (arms, lanes) = ([Arm::Unfenced, Arm::Raise], [Lane::List, Lane::Counter]);
        let rules = Rules {
            arms: &arms,
            lanes: &lanes,
            sets,
            ttl_us: 500_000,
            token_max: u64::MAX,
        };
        let finals = BTreeMap::from([
            ((Arm::Raise, "list", 0), Some(Final::default())),
            ((Arm::Unfenced, "counter", 0), None),
        ]);
        let verdict = check(&entries, &finals, &rules);
        let granted = |entry: &&Entry| matches!(entry.event, Event::Granted { .. });
        let grants = entries.iter().filter(granted).count();
        assert_eq!(usize::try_from(verdict.grants), Ok(grants));
        let kept = u64::try_from(verdict.violations.len()).unwrap();
        assert!(kept <= verdict.violations_total);
        for entry in &entries {
            assert!(set_of(entry.page, sets) < sets);
            let _ = page_of(entry.page, sets, entry.event.at());
        }
    }
}
