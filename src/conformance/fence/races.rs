//! Writers at the same time, through both clients.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::*;
use crate::random;

pub(super) async fn forty_writers_leave_the_highest(lab: &Lab<'_>) {
    const WRITERS: u64 = 40;
    let resource = lab.resource("forty");
    let done = Arc::new(AtomicBool::new(false));
    let reader = tokio::spawn(read_until(
        Arc::clone(&lab.b),
        resource.clone(),
        Arc::clone(&done),
    ));
    let start = Arc::new(Barrier::new(usize::try_from(WRITERS).unwrap()));
    let mut tasks = JoinSet::new();
    for i in 0..WRITERS {
        // 17 and 40 have no common divisor, so that each token comes once.
        let number = i * 17 % WRITERS + 1;
        let store = Arc::clone(lab.each()[usize::from(i % 2 == 0)]);
        let (resource, start) = (resource.clone(), Arc::clone(&start));
        tasks.spawn(async move {
            start.wait().await;
            let fence = held_by(u8::try_from(number).unwrap(), number);
            match try_put(&store, &resource, &number.to_string(), &fence).await {
                Ok(written) => assert!(written.applied && written.watermark.token == token(number)),
                Err(refusal) => {
                    assert_eq!(refusal.kind(), ErrorKind::Fenced, "{refusal:?}");
                    assert!(refusal.watermark() > refusal.token(), "{refusal:?}");
                }
            }
            // Acknowledged or refused: something at least as high is there from now on.
            let seen = get(&store, &resource).await;
            assert!(number <= seen.watermark.unwrap().token.get());
        });
    }
    tasks.join_all().await;
    done.store(true, Ordering::SeqCst);
    reader.await.unwrap();
    assert_is(lab, &resource, Some("40"), Some(40), 40).await;
}

/// Reads until told to stop: neither writer nor watermark go down, and each value is its writer's.
async fn read_until(store: Arc<dyn FencedStore>, resource: ResourceName, done: Arc<AtomicBool>) {
    let (mut writer, mut mark) = (0, 0);
    while !done.load(Ordering::SeqCst) {
        let seen = get(&store, &resource).await;
        if let Some(watermark) = &seen.watermark {
            let now = (number(seen.writer).unwrap_or(0), watermark.token.get());
            assert!(
                now.0 >= writer && now.1 >= mark,
                "{now:?} after {:?}",
                (writer, mark)
            );
            assert!(now.0 <= now.1, "a writer above the watermark: {now:?}");
            (writer, mark) = now;
            assert_eq!(text(seen), (writer > 0).then(|| writer.to_string()));
        }
        tokio::task::yield_now().await;
    }
}

pub(super) async fn racing_holders_of_one_number_are_one(lab: &Lab<'_>) {
    for round in 1..=12 {
        let resource = lab.resource("one-number");
        let start = Arc::new(Barrier::new(8));
        let mut tasks = JoinSet::new();
        for holder in 0..8_u8 {
            let store = Arc::clone(lab.each()[usize::from(holder % 2)]);
            let (resource, start) = (resource.clone(), Arc::clone(&start));
            tasks.spawn(async move {
                start.wait().await;
                let fence = held_by(holder, round);
                match try_put(&store, &resource, &holder.to_string(), &fence).await {
                    Ok(_) => Some(holder),
                    Err(refusal) => {
                        assert_eq!(refusal.kind(), ErrorKind::Fenced, "{refusal:?}");
                        None
                    }
                }
            });
        }
        let accepted: Vec<u8> = tasks.join_all().await.into_iter().flatten().collect();
        assert_eq!(accepted.len(), 1, "round={round} accepted={accepted:?}");
        assert_is(
            lab,
            &resource,
            Some(&accepted[0].to_string()),
            Some(round),
            round,
        )
        .await;
    }
}

/// How a task reads before it writes.
#[derive(Clone, Copy, PartialEq)]
enum Read {
    /// Raises and reads in one step.
    Raising,
    /// Only reads, as the plain check `token >= watermark` would have it.
    Plainly,
}

pub(super) async fn a_read_modify_write_with_a_raise_loses_nothing(lab: &Lab<'_>) {
    const TASKS: u64 = 8;
    const EACH: u64 = 10;
    let counter = lab.resource("counter");
    let tokens = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let store = Arc::clone(lab.each()[usize::from(task % 2 == 0)]);
        let (counter, tokens) = (counter.clone(), Arc::clone(&tokens));
        tasks.spawn(async move {
            let (mut counted, mut unknown) = (0, 0);
            while counted < EACH {
                // Each try is a new grant, and the earlier ones are stale though they go on.
                let fence = fence(tokens.fetch_add(1, Ordering::SeqCst) + 1);
                let counted_before = read(&store, &counter, &fence, Read::Raising).await;
                let added = match counted_before {
                    Ok(n) => write(&store, &counter, n + 1, &fence).await,
                    Err(refusal) => Err(refusal),
                };
                match added {
                    Ok(()) => counted += 1,
                    Err(refusal) => {
                        match refusal.kind() {
                            ErrorKind::Fenced => {}
                            // A slow store may leave it open whether an addition was applied.
                            ErrorKind::Indeterminate => unknown += 1,
                            _ => panic!("{refusal:?}"),
                        }
                        let wait = random::between(Duration::ZERO, Duration::from_millis(5));
                        tokio::time::sleep(wait).await;
                    }
                }
            }
            unknown
        });
    }
    let unknown: u64 = tasks.join_all().await.into_iter().sum();
    assert!(unknown <= TASKS, "unknown={unknown}: that is no exception");
    let total = text(get(&lab.a, &counter).await);
    let total: u64 = total.and_then(|total| total.parse().ok()).unwrap();
    assert!(
        (TASKS * EACH..=TASKS * EACH + unknown).contains(&total),
        "an update was lost or doubled: total={total} acknowledged={} unknown={unknown}",
        TASKS * EACH,
    );

    // The positive control: the same two holders, interleaved so that the race is certain. It has
    // to lose where nothing is raised; else this case would prove nothing.
    assert_eq!(
        interleaved(lab, "control-plain", Read::Plainly).await,
        (2, 1)
    );
    let (acknowledged, total) = interleaved(lab, "control-raised", Read::Raising).await;
    assert_eq!(acknowledged, total);
}

/// 33 and 34 both read, then 33 writes, then 34. Gives how many additions were acknowledged, and
/// the sum that is there.
async fn interleaved(lab: &Lab<'_>, stem: &str, how: Read) -> (u64, u64) {
    let counter = lab.resource(stem);
    let (former, latter) = (held_by(1, 33), held_by(2, 34));
    let read_by_former = read(&lab.a, &counter, &former, how).await.unwrap();
    let read_by_latter = read(&lab.b, &counter, &latter, how).await.unwrap();
    let writes = [
        write(&lab.a, &counter, read_by_former + 1, &former).await,
        write(&lab.b, &counter, read_by_latter + 1, &latter).await,
    ];
    let mut acknowledged = 0;
    for write in writes {
        match write {
            Ok(()) => acknowledged += 1,
            Err(refusal) => assert_eq!(refusal.kind(), ErrorKind::Fenced, "{refusal:?}"),
        }
    }
    let total = text(get(&lab.a, &counter).await).expect("a sum");
    (acknowledged, total.parse().unwrap())
}

async fn read(
    store: &Arc<dyn FencedStore>,
    counter: &ResourceName,
    fence: &Fence,
    how: Read,
) -> crate::Result<u64> {
    let seen = match how {
        Read::Raising => store.raise(counter, fence).await?,
        Read::Plainly => store.get(counter).await?,
    };
    Ok(text(seen).map_or(0, |sum| sum.parse().expect("a sum")))
}

async fn write(
    store: &Arc<dyn FencedStore>,
    counter: &ResourceName,
    sum: u64,
    fence: &Fence,
) -> crate::Result<()> {
    try_put(store, counter, &sum.to_string(), fence)
        .await
        .map(drop)
}
