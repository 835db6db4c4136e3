//! What fuzzing asks of a lock's record: the JSON of its two parts.

use std::path::Path;

use super::{Body, BodyRef, Elsewhere};
use crate::clock::Tick;
use crate::file::live::Live;
use crate::file::record::{Judge, Reservation, State, encode};
use crate::host::Host;
use crate::name::LockName;

/// The input is a reservation, a state, or a state's content as its slots hold it.
pub(crate) fn record(bytes: &[u8]) {
    if let Ok(reservation) = serde_json::from_slice::<Reservation>(bytes) {
        let again = encode(&reservation).ok();
        let again = again.and_then(|json| serde_json::from_slice(&json).ok());
        assert_eq!(again, Some(reservation));
    }
    match serde_json::from_slice(bytes) {
        Ok(Body::State(state)) => sound(state),
        Ok(Body::Elsewhere(elsewhere)) => {
            let Elsewhere { region, bytes, .. } = &elsewhere;
            let _ = (super::region_offset(*region), bytes);
        }
        Err(_) => {}
    }
}

/// What counts as sound can be written, read, judged and shown.
fn sound(state: State) {
    let Ok(name) = LockName::new(&state.name) else {
        return;
    };
    if !state.is_sound(&name) {
        return;
    }
    let json = encode(&BodyRef::State(&state)).ok();
    let again = json.and_then(|json| serde_json::from_slice(&json).ok());
    assert!(matches!(again, Some(Body::State(again)) if again == state));
    let host = Host {
        boot: state.boot.clone(),
        time_namespace: state
            .holders
            .first()
            .map(|entry| entry.time_namespace().to_owned())
            .unwrap_or_default(),
    };
    let live = Live::new(Path::new("/nonexistent").to_owned());
    let judge = Judge::new(Tick::from_nanos(1), &host, &live);
    let shown = state.show(&name, &judge);
    crate::fuzzing::assert_corrupt(&shown);
    assert!(shown.is_ok(), "a sound state can be shown");
    let mut state = state;
    assert!(state.take_step(&host) > 0);
}
