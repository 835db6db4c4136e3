//! What a tick belongs to: one boot of one kernel, and one time namespace of it.

#[cfg(any(target_os = "linux", target_os = "android"))]
const BOOT_ID_PATH: &str = "/proc/sys/kernel/random/boot_id";
#[cfg(any(target_os = "linux", target_os = "android"))]
const TIME_NAMESPACE_PATH: &str = "/proc/self/ns/time";

/// The present boot and time namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// Names this boot. Empty where the system does not tell; then every token is synced alone,
    /// since nobody could notice that a power loss took back what was not.
    pub(crate) boot: String,
    /// Names the time namespace, within which `CLOCK_BOOTTIME` readings can be compared
    /// (time_namespaces(7)). Empty where there are none.
    pub(crate) time_namespace: String,
}

impl Host {
    /// Asks the system.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub(crate) fn read() -> Self {
        let boot = std::fs::read_to_string(BOOT_ID_PATH).unwrap_or_default();
        let boot = boot.trim();
        let plain = boot.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        let time_namespace = std::fs::read_link(TIME_NAMESPACE_PATH)
            .ok()
            .and_then(|link| link.into_os_string().into_string().ok());
        Self {
            boot: if plain {
                boot.to_owned()
            } else {
                String::new()
            },
            time_namespace: time_namespace.unwrap_or_default(),
        }
    }

    /// Asks the system, which does not tell here.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    pub(crate) fn read() -> Self {
        Self {
            boot: String::new(),
            time_namespace: String::new(),
        }
    }

    /// True where a reboot can be told from none.
    pub(crate) fn knows_boot(&self) -> bool {
        !self.boot.is_empty()
    }
}
