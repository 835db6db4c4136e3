//! Traces by OpenTelemetry and metrics by Prometheus, wired by the program and not by the library:
//! fencelock speaks to the `tracing` and `metrics` facades, whoever listens.
//!
//! `cargo run --example observability` prints what an operator would see of one job.

use std::error::Error;

use fencelock::Locks;
use fencelock::memory::MemoryStore;
use metrics_exporter_prometheus::PrometheusBuilder;
use opentelemetry::trace::{TraceContextExt as _, TracerProvider as _};
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Instrument as _;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

#[tokio::main(flavor = "current_thread")]
#[expect(clippy::print_stdout, reason = "it shows what it collected")]
async fn main() -> Result<(), Box<dyn Error>> {
    // A real program adds its exporter here: opentelemetry-otlp, for example.
    let provider = SdkTracerProvider::builder().build();
    tracing_subscriber::registry()
        .with(tracing_opentelemetry::layer().with_tracer(provider.tracer("export")))
        .with(tracing_subscriber::fmt::layer())
        .try_init()?;
    // A real program serves this text on its own port.
    let prometheus = PrometheusBuilder::new().install_recorder()?;

    let locks = Locks::new(MemoryStore::new());
    let span = tracing::info_span!("nightly_export");
    let trace = span.context().span().span_context().trace_id().to_string();
    let job = async {
        // With its trace in the lease, `fencelock show` leads an operator to the trace.
        let guard = locks.acquire("payment-export").trace_id(&trace).await?;
        let seen = locks.inspect("payment-export").await?;
        let held_by = seen.and_then(|s| s.holders.into_iter().next());
        println!(
            "trace of the holder: {:?}",
            held_by.and_then(|h| h.info.trace_id)
        );
        guard.release().await
    };
    job.instrument(span).await?;

    println!("{}", prometheus.render());
    provider.shutdown()?;
    Ok(())
}
