//! What the run does to its clients, to their networks, and to a server of its own.

use std::time::Duration;

use rustix::process::{Signal, kill_process};

use super::super::history::Event;
use super::super::plan::Fault;
use super::super::proxy::{Mode, Proxy};
use super::{Due, Play};
use crate::failure::Result;

/// How often a client that should be awake is told so again.
const INSISTENCE: Duration = Duration::from_millis(50);

impl Play<'_> {
    /// Stops a client, wherever it is.
    pub(super) fn pause_one(&mut self) {
        let ttl = self.stage.plan.ttl;
        let Some(at) = self.victim() else {
            return;
        };
        let t = self.stage.watch.now();
        self.note(at, Event::Stopped { t });
        self.signal(at, Signal::STOP);
        let pause = self.dice.between(ttl * 6 / 5, ttl * 5 / 2);
        if let Some(seat) = self.seats.get_mut(at) {
            seat.stopped = true;
            let life = seat.life;
            self.after(pause, Due::Rouse(at, life));
        }
        self.count(Fault::Pause);
    }

    /// Lets it go on.
    pub(super) fn rouse(&mut self, at: usize, life: u32) {
        if let Some(seat) = self.seats.get_mut(at)
            && seat.life == life
            && seat.stopped
        {
            seat.stopped = false;
            self.signal(at, Signal::CONT);
            let t = self.stage.watch.now();
            self.note(at, Event::Continued { t });
        }
    }

    /// Kills a client, wherever it is.
    pub(super) fn kill_one(&mut self) {
        if let Some(at) = self.victim() {
            let t = self.stage.watch.now();
            self.note(at, Event::Killed { t });
            self.signal(at, Signal::KILL);
            self.count(Fault::Kill);
        }
    }

    /// Wakes a client that paused itself; again until it says that it is awake, for it may not have
    /// stopped yet.
    pub(super) fn wake(&mut self, at: usize, life: u32) {
        let is_asleep = self
            .seats
            .get(at)
            .is_some_and(|seat| seat.life == life && seat.nap.is_some());
        if is_asleep {
            self.signal(at, Signal::CONT);
            self.after(INSISTENCE, Due::Wake(at, life));
        }
    }

    /// A client that is at work.
    pub(super) fn victim(&mut self) -> Option<usize> {
        let at_work: Vec<usize> = self
            .seats
            .iter()
            .enumerate()
            .filter(|(_, seat)| seat.pid.is_some() && seat.nap.is_none() && !seat.stopped)
            .map(|(at, _)| at)
            .collect();
        self.dice.pick(&at_work)
    }

    /// Sets one of the faults of the network on one client, for a while.
    pub(super) fn trouble(&mut self) {
        let ttl = self.stage.plan.ttl;
        let faults: Vec<Fault> = self
            .stage
            .plan
            .faults
            .iter()
            .copied()
            .filter(|fault| fault.is_of_the_network())
            .collect();
        let calm: Vec<usize> = self
            .seats
            .iter()
            .enumerate()
            .filter(|(_, seat)| seat.trouble.is_none() && seat.pid.is_some())
            .map(|(at, _)| at)
            .collect();
        let (Some(fault), Some(at)) = (self.dice.pick(&faults), self.dice.pick(&calm)) else {
            return;
        };
        // A short delay, or one that a lease does not outlive.
        let delay = if self.dice.chance(50) {
            self.dice.between(ttl / 50, ttl / 5)
        } else {
            self.dice.between(ttl, ttl * 2)
        };
        let lasts = self.dice.between(ttl / 2, ttl * 3 / 2);
        let Some(seat) = self.seats.get_mut(at) else {
            return;
        };
        seat.trouble = Some((fault, seat.proxies.iter().map(Proxy::hits).sum()));
        for proxy in &seat.proxies {
            match fault {
                Fault::Delay => proxy.set(Mode::Delay(delay)),
                Fault::Swallow => proxy.set(Mode::Swallow),
                _ => proxy.cut(),
            }
        }
        self.after(lasts, Due::Calm(at));
    }

    /// Ends the trouble of a client's network, and counts it where it harmed anything.
    pub(super) fn calm(&mut self, at: usize) {
        let Some(seat) = self.seats.get_mut(at) else {
            return;
        };
        for proxy in &seat.proxies {
            proxy.set(Mode::Pass);
        }
        if let Some((fault, before)) = seat.trouble.take()
            && seat.proxies.iter().map(Proxy::hits).sum::<u64>() > before
        {
            self.count(fault);
        }
    }

    pub(super) async fn strike_server(&mut self) -> Result<()> {
        if self.worked_us < self.server_back_us {
            // It recovers, or nobody has found it again: another kill would prove nothing.
            self.again(Due::Server);
            return Ok(());
        }
        let ttl = self.stage.plan.ttl;
        let faults: Vec<Fault> = self
            .stage
            .plan
            .faults
            .iter()
            .copied()
            .filter(|fault| fault.is_of_the_server())
            .collect();
        let fault = self.dice.pick(&faults);
        let lasts = self.dice.between(ttl / 5, ttl * 3 / 2);
        let Some((own, janitor)) = self.stage.own.as_mut() else {
            return Ok(());
        };
        match fault {
            Some(Fault::ServerKill) => own.kill()?,
            Some(_) => own.pause(),
            None => return Ok(()),
        }
        janitor.server(own.pid());
        self.server_is_down = true;
        self.after(lasts, Due::ServerBack);
        if let Some(fault) = fault {
            if fault == Fault::ServerKill {
                let t = self.stage.watch.now();
                // It is nobody's doing.
                self.note(usize::MAX, Event::ServerKilled { t });
            }
            self.count(fault);
        }
        Ok(())
    }

    pub(super) async fn mend_server(&mut self) -> Result<()> {
        if !self.server_is_down {
            return Ok(());
        }
        self.server_is_down = false;
        self.server_back_us = self.stage.watch.now();
        if let Some((own, janitor)) = self.stage.own.as_mut() {
            own.go_on()?;
            janitor.server(own.pid());
        }
        if !self.is_ending {
            self.again(Due::Server);
        }
        Ok(())
    }

    /// Signals a client's process, which is not reaped before its end was heard of.
    pub(super) fn signal(&self, at: usize, signal: Signal) {
        if let Some(pid) = self.seats.get(at).and_then(|seat| seat.pid) {
            // It may have ended by itself.
            let _ = kill_process(pid, signal);
        }
    }
}
